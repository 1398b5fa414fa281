"""This study asks what a robust aggregator costs when nobody attacks."""
