"""This study asks which robust aggregator withstands which attack."""

__all__: list[str] = []
