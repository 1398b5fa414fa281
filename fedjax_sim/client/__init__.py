"""The local work of clients, written for ONE client; `engine` adds the axis of clients.

Most names here are functions that make a `ClientUpdate`.
"""

from fedjax_sim.client.dynamic import dynamic
from fedjax_sim.client.local_sgd import local_sgd, send_model
from fedjax_sim.client.mime import full_gradient, mime
from fedjax_sim.client.normalized import normalized
from fedjax_sim.client.optimizers import OverRounds, over_rounds, plain_sgd_rate
from fedjax_sim.client.private import private_sgd
from fedjax_sim.client.proximal import proximal
from fedjax_sim.client.scaffold import scaffold
from fedjax_sim.client.touched_rows import touched_rows
from fedjax_sim.client.unroll import unroll
from fedjax_sim.client.work import LocalOptions, LocalSteps, LocalWork, local_work, work

__all__ = [
    "LocalOptions",
    "LocalSteps",
    "LocalWork",
    "OverRounds",
    "dynamic",
    "full_gradient",
    "local_sgd",
    "local_work",
    "mime",
    "normalized",
    "over_rounds",
    "plain_sgd_rate",
    "private_sgd",
    "proximal",
    "scaffold",
    "send_model",
    "touched_rows",
    "unroll",
    "work",
]
