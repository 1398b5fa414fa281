"""Federated statistics: clients send sufficient statistics of their rows, and the server makes an estimate of them."""
