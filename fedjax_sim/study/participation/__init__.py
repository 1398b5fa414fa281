"""This study asks how many clients must take part in a round."""
