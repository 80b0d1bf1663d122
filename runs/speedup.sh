#!/usr/bin/env bash
# Figure 1: FLASH's speed-up over both Transformers on Wiki-40B.
# usage: runs/speedup.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce speedup "$@"
