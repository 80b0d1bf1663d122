#!/usr/bin/env bash
# A study of ours: what the options for a longer memory are worth on articles, and in masked text.
# usage: runs/memory_texts.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce memory_texts "$@"
