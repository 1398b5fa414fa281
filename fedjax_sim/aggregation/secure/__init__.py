"""Sums that hide single messages from the server: masks, secret shares, encryption, and the rings of integers used."""
