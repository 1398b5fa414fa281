"""The local work of clients, written for ONE client; `engine` adds the axis of clients.

Most names here are functions that make a `ClientUpdate`.
"""

from fedjax_sim.client.dynamic import dynamic as dynamic
from fedjax_sim.client.local_sgd import local_sgd as local_sgd, send_model as send_model
from fedjax_sim.client.mime import full_gradient as full_gradient, mime as mime
from fedjax_sim.client.normalized import normalized as normalized
from fedjax_sim.client.optimizers import (
    OverRounds as OverRounds,
    over_rounds as over_rounds,
    plain_sgd_rate as plain_sgd_rate,
)
from fedjax_sim.client.private import private_sgd as private_sgd
from fedjax_sim.client.proximal import proximal as proximal
from fedjax_sim.client.scaffold import scaffold as scaffold
from fedjax_sim.client.sharpness_aware import sharpness_aware as sharpness_aware
from fedjax_sim.client.touched_rows import touched_rows as touched_rows
from fedjax_sim.client.unroll import unroll as unroll
from fedjax_sim.client.work import (
    LocalOptions as LocalOptions,
    LocalSteps as LocalSteps,
    LocalWork as LocalWork,
    local_work as local_work,
    work as work,
)
