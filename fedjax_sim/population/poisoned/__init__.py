"""This subpackage holds populations in which some clients attack with their data."""
