"""How far from the optimum does training stay, and why? Error floors, their components, and what they cost."""

__all__: list[str] = []
