#!/usr/bin/env bash
# A study of ours: the position bias as a table (n < 512) and as two rotated vectors (n >= 512), at context 256.
# usage: runs/position_bias.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce position_bias "$@"
