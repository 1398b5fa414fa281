"""This subpackage puts clients into groups, for hierarchies."""

__all__: list[str] = []
