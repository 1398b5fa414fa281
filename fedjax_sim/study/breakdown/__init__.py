"""This study asks how many attackers break a robust aggregator, and how far fewer attackers can move it."""
