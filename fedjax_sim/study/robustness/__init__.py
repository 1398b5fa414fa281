"""Which rule withstands which attack? Test accuracies of rules under attacks, and the worst case of each rule."""

__all__: list[str] = []
