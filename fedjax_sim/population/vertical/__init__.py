"""Parties who hold other columns of the same rows, and how they find the rows that they share."""

__all__: list[str] = []
