"""Learning without a server: nodes train models of their own and mix them with their neighbours'."""

__all__: list[str] = []
