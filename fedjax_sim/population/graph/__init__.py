"""This subpackage divides graphs among clients."""

__all__: list[str] = []
