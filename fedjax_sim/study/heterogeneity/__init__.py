"""How different are the clients, by which measure, and does the measure predict how much slower training is?"""

__all__: list[str] = []
