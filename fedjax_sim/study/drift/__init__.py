"""This study asks what several local steps do to the point that training converges to."""
