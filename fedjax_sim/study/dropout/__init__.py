"""How often does secure aggregation abort where clients leave, and how many messages do its sums hold?"""

__all__: list[str] = []
