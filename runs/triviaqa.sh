#!/usr/bin/env bash
# Table 4: TriviaQA, pretrained by masked language modelling on Wikipedia and fine-tuned.
# usage: runs/triviaqa.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce triviaqa "$@"
