"""Multi-head attention between the two projections of a layer: five cores."""
