#!/usr/bin/env bash
# Figure 7: FLASH with one of its parts, and mixed chunks in a Transformer++.
# usage: runs/flash_ablation.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce flash_ablation "$@"
