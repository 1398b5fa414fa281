"""This study asks what differential privacy costs in accuracy."""

__all__: list[str] = []
