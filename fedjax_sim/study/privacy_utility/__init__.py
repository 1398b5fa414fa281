"""What does privacy cost? Error of the released mean, error floor and accuracy against noise and epsilon."""

__all__: list[str] = []
