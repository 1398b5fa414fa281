"""Clients with models of their own: parts of a model, models beside the shared one, clusters of clients."""
