"""Adapters of a small transformer: 1,000 clients' own, beside one pass through the frozen model.

A transformer of 128 features, 4 heads and 4 blocks over 80 characters (random text: only the time matters) is frozen.
Each client trains adapters of rank 4 in all matrices of the blocks, one step of one sequence of 32 characters. The
baselines run the same 32,000 characters through the frozen model, forward and backward to the embedded characters, with
no gradient of a weight: as one batch, and in batches of 10 and 50 sequences, whose activations stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks import harness
from fedjax_sim import algorithms, engine, models, population, sampling
from fedjax_sim.running.blocks import compiled_block, traced_round

LENGTH, VOCABULARY, RANK = 32, 80, 4
BATCHES = (10, 50)
LANES = 10  # clients at once, beside the default plan


def measure(quick: bool = False) -> dict:
    """Seconds of a round of adapters and of the frozen model's pass, in turns in one process."""
    num_clients, sizes = 1000, {"features": 128, "num_heads": 4, "num_blocks": 4}
    if quick:
        num_clients, sizes = 20, {"features": 16, "num_heads": 2, "num_blocks": 1}
    base = models.transformer(num_outputs=VOCABULARY, **sizes)
    adapted = models.lora(base, rank=RANK)
    params, state = jax.jit(adapted.init)(jax.random.key(3))
    tokens = np.random.default_rng(7).integers(0, VOCABULARY, (num_clients, LENGTH + 1)).astype(np.int32)
    x, y = tokens[:, :-1], tokens[:, 1:]
    whole = models.merged(params, state)
    calls = {
        "a round of adapters": _round(adapted, params, state, x, y),
        f"a round of adapters, {LANES} lanes": _round(adapted, params, state, x, y, plan=engine.Plan.checked(LANES)),
        "a round in fast arithmetic": _fast_round(adapted, params, state, x, y),
        "the frozen model, one batch": _frozen(base, whole, x, y, num_clients),
    }
    calls |= {f"the frozen model, batches of {b}": _frozen(base, whole, x, y, b) for b in BATCHES if b <= num_clients}
    timings = harness.interleaved(calls, repeats=3 if quick else 9)
    rows = [harness.row(name, timing, "s", ours="round" in name) for name, timing in timings.items()]
    ours, ours_in_lanes, fast, one_batch, *batches = (timing.median for timing in timings.values())
    ratios = [
        harness.ratio("time of a round against one pass as one batch", ours / one_batch, at_most=1.5),
        harness.ratio("time of a round against the best pass in batches", ours / min(one_batch, *batches)),
        harness.ratio(f"time in {LANES} lanes against one pass as one batch", ours_in_lanes / one_batch),
        harness.ratio("time in fast arithmetic against the best pass", fast / min(one_batch, *batches)),
    ]
    numbers, trained = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (whole, params))
    goal = f"{num_clients:,} clients' adapters cost at most 1.5 times the frozen model's forward and backward pass."
    notes = [f"{numbers:,} numbers, of which no client has its own; {trained:,} in a client's adapters."]
    return harness.result("P25", "adapters of a frozen transformer", goal=goal, rows=rows, ratios=ratios, notes=notes)


def _round(model: models.Model, params, state, x, y, *, plan: engine.Plan | None = None) -> Callable:
    """Makes rounds of FedAvg over the adapters of all clients, through the public recipe.

    Args:
      model: the transformer with adapters.
      params: the adapters.
      state: the frozen parameters.
      x, y: [N, L] int32, the tokens of each client and the next ones.
      plan: how clients are laid out; None chooses it.

    Returns: () -> (state, infos) after one more round of N clients with a step each.
    """
    num_clients = len(x)
    clients = population.stored({"x": x, "y": y}, np.arange(num_clients + 1))
    loss_fn = models.supervised(model, models.next_token_cross_entropy, frozen_state=state)
    algorithm = algorithms.fedavg(
        loss_fn,
        sampling.uniform(num_clients, num_clients),
        optax.sgd(0.1),
        num_steps=1,
        batch_size=1,
        plan=plan,
        mesh="all",
    )
    key = jax.random.key(5)
    start = engine.owned(algorithm.init(key, params, clients), (params, clients))
    traced = traced_round(algorithm, key, start, clients)
    block, round_state, clients, _ = compiled_block(traced, key, start, clients)
    carried = [round_state]

    def call():
        carried[0], infos = block(carried[0], clients, 0, 1)
        return carried[0], infos

    return call


def _fast_round(*args) -> Callable:
    """The same in fast arithmetic."""
    with engine.fast_arithmetic():
        return _round(*args)


def _frozen(model: models.Model, params, x, y, batch: int) -> Callable:
    """Makes passes forward through the frozen model, and back to the embedded tokens.

    Args:
      model: the transformer without adapters.
      params: its parameters.
      x, y: [N, L] int32, tokens and the next ones.
      batch: sequences of a pass, a divisor of N; N makes a single pass.

    Returns: () -> losses and gradients by the embedded tokens.
    """
    embedding, *layers = model.layers
    rest = models.sequential(layers)

    def loss(features, params, y):
        logits, _ = rest.apply(params, (), features, None, False)
        return models.next_token_cross_entropy(logits, y)["loss"].sum()

    @jax.jit
    def batches(params, x, y):
        of_batch = lambda pair: jax.value_and_grad(loss)(embedding.apply(params, pair[0]), params, pair[1])  # noqa: E731
        split = jax.tree.map(lambda rows: rows.reshape(-1, batch, LENGTH), (x, y))
        return of_batch((x, y)) if batch == len(x) else jax.lax.map(of_batch, split)

    compiled = batches.lower(params, x, y).compile(compiler_options=engine.compiler_options())
    on_device = [jax.device_put(value, where) for value, where in zip(
        (params, jnp.asarray(x), jnp.asarray(y)), compiled.input_shardings[0], strict=True)]  # fmt: skip
    return lambda: compiled(*on_device)
