"""This study asks how many seconds, bytes and joules training takes to reach a target, if clients differ in speed."""
