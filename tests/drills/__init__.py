"""Fault drills of the whole program, which `make drills` runs; docs/reliability.md says what they show."""
