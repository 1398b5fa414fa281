"""Holds what rules need that look at every message of a round: sums over rows, order statistics, products of pairs."""
