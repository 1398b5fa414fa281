"""This study asks what it costs when the availability of clients depends on their data."""
