"""A run's page, and the plots and HTML that pages of runs and studies share."""

__all__: list[str] = []
