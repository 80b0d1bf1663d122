"""The attention between the two projections of a Transformer's layer: five cores, a file each."""
