"""FedAvg and related algorithms: one server and one model, in synchronous rounds."""
