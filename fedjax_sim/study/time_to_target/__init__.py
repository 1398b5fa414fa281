"""How long, in simulated seconds, bytes and joules, until a model is good enough?"""

__all__: list[str] = []
