"""What a rule needs that looks at every message of a round: sums over rows, order statistics, pairs of messages."""

__all__: list[str] = []
