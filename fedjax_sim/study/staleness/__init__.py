"""What does it cost that models change while clients train on older ones?"""

__all__: list[str] = []
