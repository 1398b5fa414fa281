"""What do several local steps do? Fixed points of FedAvg and of its corrections, and the drift on the way there."""

__all__: list[str] = []
