"""Learning without a server: each node trains a model of its own, and mixes it with those of its neighbours."""
