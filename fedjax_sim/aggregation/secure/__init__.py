"""Sums that hide the messages in them: secret masks, shares, encryption, and the rings they are taken in."""

__all__: list[str] = []
