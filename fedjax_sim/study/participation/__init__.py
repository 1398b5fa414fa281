"""How many clients must take part? Variance of a round's aggregate, and the loss it ends in, against participation."""

__all__: list[str] = []
