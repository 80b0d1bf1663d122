#!/usr/bin/env bash
# Table 13 and Figure 6: language models on Wiki-40B, with quality against cost and the latency of a step.
# usage: runs/lm_wiki40b.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce lm_wiki40b "$@"
