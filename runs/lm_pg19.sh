#!/usr/bin/env bash
# Table 3: language models on PG-19.
# usage: runs/lm_pg19.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce lm_pg19 "$@"
