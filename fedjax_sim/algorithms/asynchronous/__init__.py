"""Asynchronous algorithms, whose server does not wait for all clients: FedBuff, FedAsync and FedAT."""
