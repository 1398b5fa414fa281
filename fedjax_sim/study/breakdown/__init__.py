"""How many attackers break a rule, and how far do fewer of them move it? Beside breakdown points and proven bounds."""

__all__: list[str] = []
