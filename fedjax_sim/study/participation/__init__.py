"""How many clients must take part? Variance of a round's aggregate, and the error floor, against participation."""

__all__: list[str] = []
