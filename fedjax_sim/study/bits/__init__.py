"""How few bits will do? Floors and bytes of quantised updates, two roundings, and what error feedback repairs."""

__all__: list[str] = []
