"""This study asks how many rounds and bytes local work saves on the way to a target loss."""
