#!/usr/bin/env bash
# Figure 8: chunk sizes, from linear attention (C = 1) to FLASH-Quad (C = T).
# usage: runs/chunk_size.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce chunk_size "$@"
