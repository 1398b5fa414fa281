"""This subpackage puts clients into groups, for hierarchies."""
