"""Fault drills of the whole program, which `make drills` runs; see docs/reliability.md."""
