#!/usr/bin/env bash
# Table 11: the time of a training step on one device.
# usage: runs/gpu_latency.sh --scale paper|gpu|cpu --texts TEXTS [--out OUT]     `lineartime reproduce --help` has the rest
# What is there is left out; stopped and started again, it goes on. What is run: lineartime/reproduce/tables.toml.
exec lineartime reproduce gpu_latency "$@"
