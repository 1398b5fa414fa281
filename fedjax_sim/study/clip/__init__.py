"""This study asks at which norm updates should be clipped."""
