#!/usr/bin/env bash
# Table 5: what mixed chunks cost a GAU and a Transformer++.
# usage: runs/gap.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce gap "$@"
