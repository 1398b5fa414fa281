"""How different are the clients, by which measure, and does it tell how much slower training is?"""

__all__: list[str] = []
