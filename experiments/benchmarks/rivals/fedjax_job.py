"""FedJAX's own FedAvg on the arrays."""

from __future__ import annotations

import time
from importlib.metadata import version

import common
import jax

if not hasattr(jax, "tree_map"):  # FedJAX 0.0.17 wants the name that JAX has moved since
    jax.tree_map = jax.tree_util.tree_map

import fedjax
import jax.numpy as jnp
import jax_models

job = common.read()
mean_loss = jax_models.loss_of(job.kind)
algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    jax.grad(lambda params, batch, rng: mean_loss(params, batch["x"], batch["y"])),
    fedjax.optimizers.sgd(job.rate),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch_size, num_epochs=1),
)
datasets = [fedjax.ClientDataset({"x": x, "y": y}) for x, y in zip(job.x, job.y, strict=True)]
start = jax.tree_util.tree_map(jnp.asarray, job.params)
state, stamps = algorithm.init(start), [time.perf_counter()]
for round in range(job.rounds):
    keys = jax.random.split(jax.random.PRNGKey(round), len(datasets))
    clients = [(b"%d" % i, data, key) for i, (data, key) in enumerate(zip(datasets, keys, strict=True))]
    state, _ = algorithm.apply(state, clients)
    jax.block_until_ready(state.params)
    stamps.append(time.perf_counter())
words = f"FedJAX {version('fedjax')} on jax {jax.__version__}"
form = "its default backend (jit), one process, jax.tree_map put back"
logits = jax.tree_util.Partial(jax_models.of(job.kind), start)
common.answer(job, stamps, state.params, logits, version=words, form=form)
