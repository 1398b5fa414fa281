"""This subpackage is about parties who hold different columns of the same rows, and how they find common rows."""
