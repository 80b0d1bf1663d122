#!/usr/bin/env bash
# A study of ours: initial matrices of the paper's 0.02 in a narrow model, at context 512.
# usage: runs/initial_values.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce initial_values "$@"
