"""Reads files that others wrote. It refuses what is no regular file, too large or too deep, and knows many tables.

Nothing is imported here, so that the command line reads its configs without JAX.
"""
