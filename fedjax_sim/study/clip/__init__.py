"""At which norm should updates be clipped? What clipping biases, against the noise that it saves."""

__all__: list[str] = []
