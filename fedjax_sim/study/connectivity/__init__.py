"""This study asks how well nodes without a server must be connected."""
