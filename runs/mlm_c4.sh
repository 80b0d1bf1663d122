#!/usr/bin/env bash
# Table 12 and Figure 5: masked language models on C4, with quality against cost and the latency of a step.
# usage: runs/mlm_c4.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce mlm_c4 "$@"
