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
import numpy as np

job = common.read()
params = {str(i): {"w": jnp.asarray(w), "b": jnp.asarray(b)} for i, (w, b) in enumerate(job.layers)}


def logits(params, x):
    for i in range(len(params)):
        x = x @ params[str(i)]["w"] + params[str(i)]["b"]
        x = jax.nn.relu(x) if i < len(params) - 1 else x
    return x


def loss(params, batch, rng):
    scores = jax.nn.log_softmax(logits(params, batch["x"]))
    return -jnp.take_along_axis(scores, batch["y"][:, None], axis=1).mean()


algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    jax.grad(loss),
    fedjax.optimizers.sgd(job.rate),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch_size, num_epochs=1),
)
datasets = [fedjax.ClientDataset({"x": x, "y": y}) for x, y in zip(job.x, job.y, strict=True)]
state, stamps = algorithm.init(params), [time.perf_counter()]
for round in range(job.rounds):
    keys = jax.random.split(jax.random.PRNGKey(round), len(datasets))
    clients = [(b"%d" % i, data, key) for i, (data, key) in enumerate(zip(datasets, keys, strict=True))]
    state, _ = algorithm.apply(state, clients)
    jax.block_until_ready(state.params)
    stamps.append(time.perf_counter())
layers = [(np.asarray(layer["w"]), np.asarray(layer["b"])) for _, layer in sorted(state.params.items())]
words = f"FedJAX {version('fedjax')} on jax {jax.__version__}"
common.answer(job, stamps, layers, version=words, form="its default backend (jit), one process, jax.tree_map put back")
