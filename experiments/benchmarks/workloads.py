"""The models and synthetic populations that several benchmarks share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, engine, models, population, sampling
from fedjax_sim.types import ClientData


class Workload(NamedTuple):
    """One federated job: equal clients whose examples fill `num_steps` batches."""

    name: str
    title: str
    loss_fn: Callable  # (params, examples, key) -> losses [b]
    params: Any
    data: Any  # population.Stored: N clients of num_steps * batch_size rows
    cohort_size: int
    num_steps: int
    batch_size: int
    learning_rate: float
    macs: float  # multiply-adds of one example's forward pass
    input_macs: float  # of its first layer, which needs no gradient of its input

    @property
    def num_params(self) -> int:
        """d."""
        return sum(x.size for x in jax.tree.leaves(self.params))

    @property
    def client_flops(self) -> float:
        """Of one client's local training: forward, weight gradients, input gradients except of the first layer."""
        return self.num_steps * self.batch_size * (6 * self.macs - 2 * self.input_macs)

    @property
    def arrays(self) -> tuple[Any, Any]:
        """The population's flat x and y, [N * rows, ...]."""
        return self.data.examples["x"], self.data.examples["y"]


def _mlp(widths: tuple[int, ...]) -> tuple[models.Model, float, float]:
    layers = [a * b for a, b in itertools.pairwise(widths)]
    model = models.mlp(input_shape=widths[:1], num_outputs=widths[-1], hidden=widths[1:-1])
    return model, sum(layers), layers[0]


def _small_cnn(side: int, depth: int, num_outputs: int) -> tuple[models.Model, float, float]:
    """Makes two VALID 3 x 3 convolutions (32, 64), a 2 x 2 max pool, 128 hidden units: the usual federated CNN.

    Args:
      side: pixels of a picture's side, even.
      depth: channels of a picture.
      num_outputs: classes.

    Returns: (model, multiply-adds of one example's forward pass, those of its first layer).
    """
    pooled = (side - 4) // 2
    sizes = [(3, depth, 32), (3, 32, 64)]
    macs = [(side - 2) ** 2 * 9 * depth * 32, (side - 4) ** 2 * 9 * 32 * 64]
    macs += [pooled**2 * 64 * 128, 128 * num_outputs]
    layers = models.layers

    def init(key):
        keys = jax.random.split(key, 4)
        return {
            "conv_0": layers.init_convolution(keys[0], *sizes[0]),
            "conv_1": layers.init_convolution(keys[1], *sizes[1]),
            "hidden": layers.init_dense(keys[2], pooled**2 * 64, 128, relu=True),
            "output": layers.init_dense(keys[3], 128, num_outputs),
        }

    model = models.from_fn(init, lambda params, x: small_cnn_logits(params, x, layers.convolution))
    return model, float(sum(macs)), float(macs[0])


def small_cnn_logits(params: Any, x: jax.Array, convolution: Callable) -> jax.Array:
    """Logits of that CNN with any convolution (params, x, padding=) -> y."""
    layers = models.layers
    x = jax.nn.relu(convolution(params["conv_0"], x, padding="VALID"))
    x = layers.max_pool(jax.nn.relu(convolution(params["conv_1"], x, padding="VALID")))
    return layers.dense(params["output"], jax.nn.relu(layers.dense(params["hidden"], x.reshape(x.shape[0], -1))))


def _cnn_12k() -> tuple[models.Model, float, float]:
    """Two VALID 3 x 3 convolutions (16, 32), each with a 2 x 2 max pool, on 28 x 28 digits: 12,810 parameters."""
    layers = models.layers

    def init(key):
        keys = jax.random.split(key, 3)
        return {
            "conv_0": layers.init_convolution(keys[0], 3, 1, 16),
            "conv_1": layers.init_convolution(keys[1], 3, 16, 32),
            "output": layers.init_dense(keys[2], 5 * 5 * 32, 10),
        }

    def logits(params, x):
        for name in ("conv_0", "conv_1"):
            x = layers.max_pool(jax.nn.relu(layers.convolution(params[name], x, padding="VALID")))
        return layers.dense(params["output"], x.reshape(x.shape[0], -1))

    macs = [26 * 26 * 9 * 16, 11 * 11 * 9 * 16 * 32, 5 * 5 * 32 * 10]
    return models.from_fn(init, logits), float(sum(macs)), float(macs[0])


def _recurrent(
    make: Callable, gates: int, length: int, vocabulary: int, hidden: int
) -> tuple[models.Model, float, float]:
    embedding = 8
    model = make(num_outputs=vocabulary, embedding=embedding, hidden=hidden)
    return model, length * (gates * hidden * (embedding + hidden) + hidden * vocabulary), 0.0


# name: title, model, input shape or (length, vocabulary), outputs, N, m, steps, b, rate
WORKLOADS = {
    "mlp": ("MLP 60-128-10, 2 steps of 10", lambda: _mlp((60, 128, 10)), (60,), 10, 2000, 1000, 2, 10, 0.1),
    "tiny": ("tiny MLP 32-32-10, 10 steps of 1", lambda: _mlp((32, 32, 10)), (32,), 10, 5000, 2000, 10, 1, 0.05),
    "logistic": ("logistic 784-62, 5 steps of 20", lambda: _mlp((784, 62)), (784,), 62, 400, 200, 5, 20, 0.05),
    "large_mlp": (
        "MLP 784-200-200-62, 5 steps of 20", lambda: _mlp((784, 200, 200, 62)), (784,), 62, 200, 100, 5, 20, 0.05
    ),
    "femnist_cnn": (
        "FEMNIST CNN, 5 steps of 20", lambda: _small_cnn(28, 1, 62), (28, 28, 1), 62, 40, 10, 5, 20, 0.05
    ),
    "cifar_cnn": (
        "CIFAR CNN of pfl-research, 5 steps of 10", lambda: _small_cnn(32, 3, 10), (32, 32, 3), 10, 1000, 50, 5, 10, 0.1
    ),
    "gru": (
        "GRU 128, 80 characters, 2 steps of 4", lambda: _recurrent(models.gru, 3, 80, 80, 128), (80,), 80,
        200, 50, 2, 4, 0.5,
    ),
    "lstm": (
        "LSTM 128, 80 characters, 2 steps of 4", lambda: _recurrent(models.lstm, 4, 80, 80, 128), (80,), 80,
        200, 50, 2, 4, 0.5,
    ),
    "softmax": ("softmax 60-10, 2 steps of 10", lambda: _mlp((60, 10)), (60,), 10, 200, 100, 2, 10, 0.1),
    "cnn_12k": ("CNN of 12,810 parameters, 2 steps of 10", _cnn_12k, (28, 28, 1), 10, 40, 20, 2, 10, 0.1),
}  # fmt: skip


def workload(name: str, *, cohort_size: int | None = None, num_clients: int | None = None) -> Workload:
    """A workload by name, from fixed seeds: two processes have identical arrays."""
    title, build, shape, num_outputs, clients, cohort, steps, batch, rate = WORKLOADS[name]
    clients, cohort = num_clients or clients, cohort_size or cohort
    clients = max(clients, cohort)
    model, macs, input_macs = build()
    rng = np.random.default_rng(7)
    rows = clients * steps * batch
    if name in ("gru", "lstm"):
        text = rng.integers(0, num_outputs, (rows, shape[0] + 1)).astype(np.int32)
        x, y = text[:, :-1], text[:, 1:]
        loss = models.next_token_cross_entropy
    else:
        x, y = separable(rng, rows, shape, num_outputs)
        loss = models.softmax_cross_entropy
    data = population.stored({"x": x, "y": y}, np.arange(0, rows + 1, steps * batch))
    loss_fn, params = models.supervised(model, loss), model.init(jax.random.key(3))[0]
    return Workload(
        name=name,
        title=title,
        loss_fn=loss_fn,
        params=params,
        data=data,
        cohort_size=cohort,
        num_steps=steps,
        batch_size=batch,
        learning_rate=rate,
        macs=macs,
        input_macs=input_macs,
    )


def separable(rng, rows: int, shape: tuple[int, ...], num_outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of noise around a mean per class, so that training has something to find."""
    means = rng.normal(size=(num_outputs, *shape)).astype(np.float32)
    y = rng.integers(0, num_outputs, rows).astype(np.int32)
    x = rng.standard_normal((rows, *shape), np.float32)
    x += 0.5 * means[y]
    return x / np.float32(np.sqrt(1.25)), y


def algorithm(
    work: Workload, *, plan: engine.Plan | None = None, sampler: Any = None, mesh: Any = "all", **options: Any
) -> Any:
    """FedAvg over the workload through the public recipe."""
    sampler = sampling.uniform(work.data.size, work.cohort_size) if sampler is None else sampler
    return algorithms.fedavg(
        work.loss_fn, sampler, optax.sgd(work.learning_rate), num_steps=work.num_steps, batch_size=work.batch_size,
        plan=plan, mesh=mesh, **options,
    )  # fmt: skip


# ---- populations of any size


def table_client(parameters: Any, id: jax.Array) -> ClientData:
    """A client whose rows are drawn from a shared table by its id: N clients cost what one does."""
    key = jax.random.fold_in(jax.random.wrap_key_data(parameters["key"], impl="threefry2x32"), id)
    rows = jax.random.randint(key, parameters["mask"].shape, 0, parameters["y"].shape[0])
    return ClientData({"x": parameters["x"][rows], "y": parameters["y"][rows]}, jnp.asarray(parameters["mask"]))


class Massive(NamedTuple):
    """FedAvg of a softmax regression 784-10 (d = 7,850) over clients of `table_client`."""

    algorithm: Any
    params: Any
    data: Any  # population.Generated


def massive(
    num_clients: int, cohort_size: int, *, rows: int = 20, num_steps: int = 5, batch_size: int = 10,
    plan: engine.Plan | None = None,
) -> Massive:  # fmt: skip
    """N clients of `rows` rows of a table of 10,000; the cohort is everybody where m = N."""
    rng = np.random.default_rng(11)
    x, y = separable(rng, 10_000, (784,), 10)
    model = models.logistic(input_shape=(784,), num_outputs=10)
    shared = {"x": jnp.asarray(x), "y": jnp.asarray(y), "mask": jnp.ones(rows, bool)}
    shared["key"] = jnp.asarray([17, 4], jnp.uint32)
    data = population.generated(num_clients, table_client, shared)
    everybody = num_clients == cohort_size
    sampler = sampling.full(num_clients) if everybody else sampling.uniform(num_clients, cohort_size)
    loss_fn = models.supervised(model, models.softmax_cross_entropy)
    work = {"num_steps": num_steps, "batch_size": batch_size, "plan": plan}
    made = algorithms.fedavg(loss_fn, sampler, optax.sgd(0.05), **work)
    return Massive(made, model.init(jax.random.key(0))[0], data)


def chained_rounds(algorithm: Any, params: Any, data: Any, num_rounds: int) -> Callable:
    """Rounds in one compiled loop, as `run` makes them: () -> state, which the next call takes up and overwrites.

    Client memory is then updated in place. `rounds_program` begins anew, and copies it in each call.
    """
    key = jax.random.key(5)
    state = [jax.jit(algorithm.init)(key, params, data)]

    @partial(jax.jit, donate_argnums=0)
    def program(state, data):
        def one_round(i, state):
            return algorithm.step(jax.random.fold_in(key, i), state, data)[0]

        return jax.lax.fori_loop(0, num_rounds, one_round, state)

    def rounds():
        state[0] = program(state[0], data)
        return state[0]

    return rounds


def rounds_program(algorithm: Any, params: Any, data: Any, num_rounds: int, metric: str = "local_loss") -> Callable:
    """The algorithm's rounds in one compiled loop: () -> (state, metric of each round)."""
    key = jax.random.key(5)
    state = jax.jit(algorithm.init)(key, params, data)

    @jax.jit
    def program(key, state, data):
        def one_round(i, carry):
            state, values = carry
            state, info = algorithm.step(jax.random.fold_in(key, i), state, data)
            return state, values.at[i].set(info[metric])

        return jax.lax.fori_loop(0, num_rounds, one_round, (state, jnp.zeros(num_rounds)))

    return lambda: program(key, state, data)
