"""Where does training come to rest, and what keeps it there? Floors, their components, and what they cost."""

__all__: list[str] = []
