"""This study asks what it costs that the model changes while clients train on older versions of it."""
