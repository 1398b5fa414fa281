"""Who should add the noise? The server, secure shares or every client: the variance of the mean against the cohort."""

__all__: list[str] = []
