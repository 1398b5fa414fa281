"""Models that are cut between parties: split, vertical and graph learning."""

__all__: list[str] = []
