"""Fault drills of the whole program: processes are killed, files are damaged, command lines make no sense.

`make drills` runs them; docs/reliability.md says what they show. A trial is determined by its part, a seed and a
number; its processes are forked from one that has imported everything."""
