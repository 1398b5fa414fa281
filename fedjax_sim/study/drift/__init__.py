"""What do several local steps do? Where FedAvg and its corrections come to rest, and the drift on the way."""

__all__: list[str] = []
