#!/usr/bin/env bash
# A study of ours: the learning rates of the smallest scale, at context 512.
# usage: runs/learning_rates.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce learning_rates "$@"
