"""How few bits will do? Floors and bytes of quantised letters, two roundings, and what feedback repairs."""

__all__: list[str] = []
