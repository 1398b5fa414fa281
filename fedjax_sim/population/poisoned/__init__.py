"""This subpackage holds populations in which some clients attack with their data."""

__all__: list[str] = []
