"""This study asks what FedProx gains where some clients finish only part of their local work."""
