"""This study asks which robust aggregator withstands which attack."""
