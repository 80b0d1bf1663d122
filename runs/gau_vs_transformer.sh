#!/usr/bin/env bash
# Figure 3: GAU and Transformers at context 512, causal and masked.
# usage: runs/gau_vs_transformer.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce gau_vs_transformer "$@"
