"""Data sets: those that come with the package, those that are read from files, and those that are drawn."""

__all__: list[str] = []
