#!/usr/bin/env bash
# Table 2: changes to MHSA.
# usage: runs/mhsa_ablation.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce mhsa_ablation "$@"
