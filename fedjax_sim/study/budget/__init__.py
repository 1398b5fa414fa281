"""This study asks how to spend a budget of bytes, joules or seconds: on which cohort, deadline and bits."""
