"""What does a robust rule cost where nobody attacks? Variances on normal messages, accuracies on the digits."""

__all__: list[str] = []
