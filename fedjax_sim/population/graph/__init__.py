"""This subpackage divides graphs among clients."""
