"""Federated, split and SplitFed learning of the same task, side by side.

    python experiments/split_beside_federated.py

Twenty clients with handwritten digits train a perceptron of three layers for thirty epochs. In federated learning each
trains all of it and sends it; with a cut after the first layer a client computes that layer alone, and what crosses is
sent in every step. In simulated time phones make 1 Gflop/s behind links of 1 MB/s and 50 ms, the server 100 Gflop/s:
a relay adds its clients up. Leakage is what a curious server rebuilds of the examples (the share of their variance, by
an affine decoder that it fits to 200 test digits; from an update, the nearest example to the row whose bias moved most)
and of the labels (the share that it has right). Nothing is hidden by the architecture alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import adversary, algorithms, models, network, population, sampling, transform
from fedjax_sim.algorithms.split.loss import split_transcript
from fedjax_sim.round.round import observe

CLIENTS, BATCH, RATE, KNOWN = 20, 10, 0.1, 200
PHONE, SERVER, BANDWIDTH, LATENCY = 1e9, 1e11, 1e6, 0.05
NOISY = network.link(forward=transform.local_gaussian(20.0, 0.025))  # a deviation of one half
WAYS = {
    "federated": {},
    "split": {"relay": True, "cut": "hidden_0"},
    "split, U-shaped": {"relay": True, "cut": ("hidden_0", "hidden_1"), "u_shaped": True},
    "SplitFed": {"cut": "hidden_0"},
    "SplitFed, noise": {"cut": "hidden_0", "link": NOISY},
    "SplitFed, NoPeek": {"cut": "hidden_0", "decorrelation": 5.0},
    "SplitFed, private labels": {"cut": "hidden_0", "epsilon": 3.0},
}


class Row(NamedTuple):
    """What one way costs and tells."""

    name: str
    accuracy: float
    megabytes: float  # of all clients and rounds, both ways
    client_mflop: float  # of a client in a round
    seconds: float  # of simulated time a round
    examples: float  # share of the examples' variance that the server rebuilds
    labels: float  # share of the labels that it has right


def measured(name: str, rounds: int) -> Row:
    """Trains one way, and attacks what its server sees in the end."""
    options = dict(WAYS[name])
    relay, epsilon = options.pop("relay", False), options.pop("epsilon", None)
    clean = population.digits(num_clients=CLIENTS)
    data = clean if epsilon is None else population.with_private_labels(clean, epsilon=epsilon)
    model = models.mlp(input_shape=data.input_shape, num_outputs=data.num_outputs, hidden=(32, 16))
    loss, sampler = models.softmax_cross_entropy, sampling.full(CLIENTS)
    work = {"num_epochs": 1, "batch_size": BATCH}
    if not options:
        made = algorithms.fedavg(models.supervised(model, loss), sampler, optax.sgd(RATE), **work)
    else:
        make = algorithms.split_learning if relay else algorithms.splitfed
        made = make(model, loss, sampler, optax.sgd(RATE), **options, **work)
    key, params = jax.random.key(1), model.init(jax.random.key(0))[0]
    state, step, sent = made.init(key, params, data.train), jax.jit(made.step), 0
    for t in range(rounds):
        before, state_key = state, jax.random.fold_in(key, t)
        state, info = step(state_key, state, data.train)
        sent += sum(x.total() for name, x in info.items() if name.endswith("link_bytes") or name.startswith("split_"))
    params = made.params(state)
    split = algorithms.split_loss(model, loss, options.pop("cut", "hidden_0"), **options)
    told = split(params, data.test)  # as a user asks it, through the links
    client = jax.device_get(data.train.client(jnp.int32(0)))
    rows = np.flatnonzero(client.mask)[:BATCH]
    batch = {name: jnp.asarray(client.examples[name][rows]) for name in ("x", "y")}
    truth = jnp.asarray(clean.train.client(jnp.int32(0)).examples["y"][rows])
    costs, steps = algorithms.split_costs(split, params, batch), -(-int(client.mask.sum()) // BATCH)
    seconds, flops = _times(name, costs, steps, relay)
    if name == "federated":
        leak = _of_updates(adversary.each_message(observe(made, state_key, before, data.train)), batch, truth)
    else:
        leak = _of_the_cut(split, params, batch, _told(clean, data), data.test)
    return Row(name, float(told["accuracy"].mean()), sent / 1e6, flops / 1e6, seconds, *leak)


def _times(name: str, costs: algorithms.SplitCosts, steps: int, relay: bool) -> tuple[float, float]:
    """(seconds of a round, operations of a client in it)."""
    whole, own = sum(costs.training_flops), costs.training_flops[0]
    held = costs.num_values[0] if name != "federated" else sum(costs.num_values)
    weights = 2 * (LATENCY + 4 * held / BANDWIDTH)
    if name == "federated":
        return steps * whole / PHONE + weights, steps * whole
    speeds = [PHONE] + [SERVER] * (len(costs.num_values) - 1)
    one = steps * costs.time(speeds, bandwidth=BANDWIDTH, latency=LATENCY).seconds + weights
    return one * (CLIENTS if relay else 1), steps * own


def _told(clean, data) -> float:
    """The share of all clients' labels that are sent as they are."""
    ids = jnp.arange(CLIENTS)
    own, sent = (jax.vmap(x.train.client)(ids) for x in (clean, data))
    return float((own.examples["y"] == sent.examples["y"])[own.mask].mean())


def _of_the_cut(split, params, batch, told, test) -> tuple[float, float]:
    """Attacks one step's messages at the server.

    The rebuilt share is 1 - (error of the rebuilt examples), as `adversary.inversion_error` measures it, and at least
    0.

    Args:
      split: the loss that is split between a client and the server.
      params: the trained model.
      batch: one client's examples of a step.
      told: the share of the labels that clients send as they are.
      test: held-out examples. The server knows the first `KNOWN`, and those behind them are rebuilt.

    Returns: (share of the examples' variance, share of the labels in [0, 1]).
    """
    known = {name: jnp.asarray(test[name][:KNOWN]) for name in ("x", "y")}
    asked = split_transcript(split, params, known, jax.random.key(7)).seen_by(1)
    rest = {name: jnp.asarray(test[name][KNOWN:]) for name in ("x", "y")}
    seen = split_transcript(split, params, rest, jax.random.key(8)).seen_by(1)
    own, other = (next(m.value for m in x if m.kind == "activations") for x in (asked, seen))
    guess = adversary.invert_smashed(other, own, known["x"])
    rebuilt = 1 - float(adversary.inversion_error(guess, rest["x"]))
    labels = split_transcript(split, params, batch, jax.random.key(9)).seen_by(1)
    if any(m.kind == "labels" for m in labels):
        return max(rebuilt, 0.0), told
    gradients = [next(m.value for m in x if m.kind == "gradients") for x in (asked, seen)]
    guesses = adversary.labels_by_direction(gradients[1], gradients[0], known["y"])
    return max(rebuilt, 0.0), float((guesses == rest["y"]).mean())


def _of_updates(view, batch, truth) -> tuple[float, float]:
    """The same from one client's update: the example nearest to its first layer's row, and its labels' counts."""
    guess = adversary.invert_affine(view, "hidden_0")[0]
    distance = jnp.square(batch["x"] - guess[None]).sum(1).min()
    spread = jnp.square(batch["x"] - batch["x"].mean(0)[None]).sum(1).mean()
    guesses = adversary.recover_labels(view, "output", num_examples=len(truth), learning_rate=RATE)[0]
    both = sum(min(int((guesses == c).sum()), int((truth == c).sum())) for c in range(10))
    return max(1 - float(distance / spread), 0.0), both / len(truth)


def main(rounds: int = 30, names: tuple[str, ...] = tuple(WAYS)) -> list[Row]:
    """Prints the table, and returns its rows."""
    print(f"{'':26}accuracy  MB sent  client MFLOP/round  seconds/round  examples rebuilt  labels found")
    found = []
    for name in names:
        row = measured(name, rounds)
        print(f"{name:26}{row.accuracy:8.3f} {row.megabytes:8.2f} {row.client_mflop:19.2f} {row.seconds:14.2f}"
              f"{row.examples:18.2f} {row.labels:13.2f}")  # fmt: skip
        found.append(row)
    return found


if __name__ == "__main__":
    main()
