#!/usr/bin/env bash
# Table 1: changes to GAU.
# usage: runs/gau_ablation.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce gau_ablation "$@"
