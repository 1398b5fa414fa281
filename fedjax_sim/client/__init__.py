"""Local work, written for ONE client; `engine` adds the axis of clients. Most names are factories of `ClientUpdate`."""

from fedjax_sim.client.dynamic import dynamic
from fedjax_sim.client.local_sgd import local_sgd, send_model
from fedjax_sim.client.mime import full_gradient, mime
from fedjax_sim.client.normalized import normalized
from fedjax_sim.client.optimizers import OverRounds, over_rounds
from fedjax_sim.client.private import private_sgd
from fedjax_sim.client.proximal import proximal
from fedjax_sim.client.scaffold import scaffold
from fedjax_sim.client.touched_rows import touched_rows
from fedjax_sim.client.work import LocalWork, work

__all__ = [
    "LocalWork",
    "OverRounds",
    "dynamic",
    "full_gradient",
    "local_sgd",
    "mime",
    "normalized",
    "over_rounds",
    "private_sgd",
    "proximal",
    "scaffold",
    "send_model",
    "touched_rows",
    "work",
]
