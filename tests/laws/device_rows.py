"""Run as a script: digests of whole logs of one kind's rows, one JSON line a row.

On several numbers of devices; -3 stands for three with the cohort backwards, which finds what follows either.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from fedjax_sim import aggregation, client, engine, models, population, server
from fedjax_sim.algorithms import federated
from fedjax_sim.types import Algorithm, Sampler
from tests.laws import cases, problems as p, test_compositions

SAMPLER, FEATURES, CLASSES, ROUNDS = cases.SAMPLER, 64, 10, 5
WORKS = {  # local work: steps, batch, lanes and chunk (None: the plan's own, a chunk for the whole cohort)
    "steps": ({"num_steps": 3, "batch_size": 10}, None),
    "full": ({"num_steps": 2, "batch_size": None}, engine.Plan(2, 4)),
    "one": ({"num_steps": 1, "batch_size": 7}, engine.Plan(4, 4)),
}


def rows():
    """Ragged clients of up to 50 rows, whose padding holds NaN."""
    rng = np.random.default_rng(5)
    mask = np.arange(50) < rng.integers(11, 51, (p.NUM_CLIENTS, 1))
    x = np.where(mask[..., None], rng.normal(size=(*mask.shape, FEATURES)), np.nan).astype(np.float32)
    y = np.where(mask, rng.integers(0, CLASSES, mask.shape), -1).astype(np.int32)
    return population.generated(p.NUM_CLIENTS, p._read, {"x": jnp.array(x), "y": jnp.array(y), "mask": jnp.array(mask)})


def softmax_loss(params, examples, key):
    """A user's own loss, its parameters one flat array."""
    scores = examples["x"] @ params.reshape(FEATURES, CLASSES)
    return optax.softmax_cross_entropy_with_integer_labels(scores, examples["y"])


def tanh_loss(params, examples, key):
    """Another, with a division of its own."""
    hidden = jnp.tanh(examples["x"] @ params.reshape(FEATURES, CLASSES) / 8.1)
    wanted = jax.nn.one_hot(examples["y"], CLASSES)
    return ((hidden - wanted) ** 2).mean(-1) / (0.3 + (hidden**2).mean(-1))


def short_loss(params, examples, key):
    """The same in bfloat16, as the parameters are, from the product on."""
    return tanh_loss(params, examples | {"x": examples["x"].astype(params.dtype)}, key)


def backwards(sampler: Sampler) -> Sampler:
    """The same cohorts, from the last slot to the first."""

    def turned(key, cohort):
        rows = {name: x for name, x in cohort._asdict().items() if name != "metrics"}  # those are of the whole cohort
        return cohort._replace(**jax.tree.map(lambda x: x[::-1], rows))

    return sampler.then(turned)


def star(sampler=None, **parts) -> Algorithm:
    sampler = cases.SAMPLER if sampler is None else sampler
    work = client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(**cases.WORK))
    given = {"client": work, "aggregator": aggregation.mean(), "server": server.optimizer(optax.sgd(0.7))} | parts
    return federated(sampler, **given, **cases.RUN)


def algorithm(kind: str, name: str, turn: Callable) -> Algorithm:
    if kind == "algorithms":
        return cases.CASES[kind][name]()
    if kind == "transform":
        member = test_compositions.MEMBERS[name]()
        return star(transform=member, aggregator=test_compositions.aggregator_for(name))
    if kind == "sampling":
        return star(turn(cases.CASES[kind][name]()), aggregator=aggregation.fixed_mean(7.0))
    return star(aggregator=cases.CASES[kind][name]())


def names(kind: str) -> list[str]:
    """The rows of a kind; modular and secure sums stand behind the transforms that send integers."""
    rows = test_compositions.MEMBERS if kind == "transform" else cases.CASES[kind]
    return sorted(rows.keys() - (cases.integer_sums() if kind == "aggregation" else set()))


def digest(kind: str, name: str, work: str, count: int, loss: str) -> str:
    """(of the states and logs of some rounds, whether the algorithm says that the order of its cohorts counts)."""
    options, plan = WORKS[work]
    cases.WORK.update(options)
    cases.RUN.update(plan=plan, mesh=engine.device_mesh(abs(count)))
    turn = backwards if count < 0 else lambda sampler: sampler
    cases.SAMPLER = SAMPLER if kind == "sampling" else turn(SAMPLER)  # a sampler's row is turned as a whole
    p.ROWS, params = 50, jnp.zeros(FEATURES * CLASSES, jnp.bfloat16 if loss == "short" else jnp.float32)
    p.linear_loss = {"softmax": softmax_loss, "tanh": tanh_loss, "short": short_loss}.get(loss)
    if loss == "mlp":
        model = models.mlp(input_shape=(FEATURES,), num_outputs=CLASSES, hidden=(16,))
        own, params = models.supervised(model, models.default_loss("classification")), model.init(jax.random.key(2))[0]
        array, apart = ravel_pytree(params)
        p.linear_loss = lambda params, *rest: own(params if isinstance(params, dict) else apart(params), *rest)
        params = params if kind == "algorithms" else array  # many rows act on one array
    made, data, found = algorithm(kind, name, turn), rows(), []
    state, step = made.init(jax.random.key(0), params, data), jax.jit(made.step)
    for i in range(ROUNDS):
        state, info = step(jax.random.fold_in(jax.random.key(1), i), state, data)
        found.append(jax.device_get((made.params(state), info)))
    return p.digest((found, jax.device_get(unpadded(state))))


def unpadded(state):
    """The state without the rows that fill up client memory which is split over devices."""

    def split(x):
        return isinstance(x, engine.Sharded)

    def own(x):
        return jax.tree.map(lambda rows: rows[: x.size], x.rows) if split(x) else x

    return jax.tree.map(own, state, is_leaf=split)


def main(kind: str, counts: str, losses: str, works: str, *chosen: str) -> None:
    for name in chosen or names(kind):
        for loss in losses.split(","):
            for work in works.split(","):
                found = {count: digest(kind, name, work, count, loss) for count in map(int, counts.split(","))}
                forward, backward = ({x for n, x in found.items() if (n < 0) == b} for b in (False, True))
                equal = len(forward) == 1 and len(backward) <= 1
                # Where clients follow one another, another order is another result.
                in_turns = kind == "algorithms" and cases.CASES[kind][name].in_turns
                equal &= not backward or (forward != backward) == in_turns
                row = {"row": name, "loss": loss, "work": work, "equal": equal, "digests": found}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(*sys.argv[1:])
