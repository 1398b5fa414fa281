"""What does more local work save? Rounds, bytes and gradients until a target loss, against local steps and batches."""

__all__: list[str] = []
