"""This study asks what a curious server learns from the messages of a round, and which defences prevent it."""
