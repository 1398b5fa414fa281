"""This study asks how often secure aggregation aborts when clients leave, and how many messages its sums hold."""
