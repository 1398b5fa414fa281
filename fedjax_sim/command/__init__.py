"""The command line, `fedjax-sim`: a file for each group of commands."""

__all__: list[str] = []
