"""One client's room: written for one client, no batch axis."""

from fedjax_sim.client.local_sgd import local_sgd, send_model
from fedjax_sim.client.normalized import normalized
from fedjax_sim.client.proximal import proximal

__all__ = ["local_sgd", "normalized", "proximal", "send_model"]
