"""What does it cost when who is there depends on the data? Bias and variance of FedAvg, and of its correction."""

__all__: list[str] = []
