"""FedAvg and its family: one server, one model, synchronous rounds."""

__all__: list[str] = []
