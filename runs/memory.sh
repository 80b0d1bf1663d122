#!/usr/bin/env bash
# A study of ours: what FLASH's linear half and the options beyond the paper are worth at context 4096 on books.
# usage: runs/memory.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce memory "$@"
