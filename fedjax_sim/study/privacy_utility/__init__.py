"""This study asks what differential privacy costs in accuracy."""
