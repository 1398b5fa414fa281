"""FedAvg with DrJAX on the arrays: broadcast, map_fn and reduce_mean in one jitted program a round."""

from __future__ import annotations

import contextlib
import time
from importlib.metadata import version

import common
import drjax
import jax
import jax_models
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

job = common.read()
m, n = job.y.shape[:2]
gradient = jax.grad(jax_models.loss_of(job.kind))


def local_sgd(params, data):
    """One epoch of one client; data: (x, y), each [steps, b, ...]."""

    def step(params, batch):
        return jax.tree.map(lambda p, g: p - job.rate * g, params, gradient(params, *batch)), None

    return jax.lax.scan(step, params, data, unroll=True)[0]  # a loop would keep XLA:CPU from its convolutions


@drjax.program(clients=m)
def fedavg(params, data):
    return drjax.reduce_mean(drjax.map_fn(local_sgd, (drjax.broadcast(params), data)))


rng = np.random.default_rng(0)
rows = np.stack([rng.permutation(n) for _ in range(m)])
data = tuple(np.stack([a[r] for a, r in zip(part, rows, strict=True)]) for part in (job.x, job.y))
data = tuple(a.reshape(m, n // job.batch_size, job.batch_size, *a.shape[2:]) for a in data)
devices = len(jax.devices()) if m % len(jax.devices()) == 0 else 1
mesh = jax.make_mesh((devices,), ("clients",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
everywhere = NamedSharding(mesh, PartitionSpec())
params = start = jax.device_put(job.params, everywhere)
data = jax.device_put(data, NamedSharding(mesh, PartitionSpec("clients")))
round_program = jax.jit(fedavg, out_shardings=everywhere)
jax.block_until_ready((params, data))
with jax.set_mesh(mesh) if devices > 1 else contextlib.nullcontext():
    stamps = [time.perf_counter()]
    for _ in range(job.rounds):
        params = jax.block_until_ready(round_program(params, data))
        stamps.append(time.perf_counter())
words = f"DrJAX {version('drjax')} on jax {jax.__version__}"
where = f"a mesh of {devices} devices over the clients" if devices > 1 else "one device, no mesh"
form = f"one jitted drjax.program a round (map_fn is a vmap), local steps unrolled, {where}, rows shuffled once"
common.answer(
    job, stamps, jax.device_get(params), lambda x: jax_models.of(job.kind)(start, x), version=words, form=form
)
