"""This study asks what a robust aggregator costs when nobody attacks."""

__all__: list[str] = []
