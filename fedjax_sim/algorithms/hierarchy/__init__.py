"""Hierarchical algorithms: a client of a federation is itself a federation, as an edge with its devices is."""
