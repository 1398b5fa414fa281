"""What do messages leak? Digits rebuilt, labels recovered and members found by a curious server, under each defence."""

__all__: list[str] = []
