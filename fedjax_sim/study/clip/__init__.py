"""At which norm should updates be clipped? The bias of clipping against the noise that a smaller norm saves."""

__all__: list[str] = []
