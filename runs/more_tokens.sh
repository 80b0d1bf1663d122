#!/usr/bin/env bash
# A study of ours: larger models and more tokens than the smallest scale has, at context 512 on books.
# usage: runs/more_tokens.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce more_tokens "$@"
