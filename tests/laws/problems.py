"""Small real problems that the laws share: ragged clients whose padding rows hold NaN, and a cohort given as data."""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import aggregation, client, population, server
from fedjax_sim.algorithms import federated
from fedjax_sim.engine import Plan
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.types import ClientData, ClientFacts, ClientUpdate, Cohort, Sampler, noisy_parts

NUM_CLIENTS, ROWS, WIDTH, SLOTS = 24, 6, 3, 10
PLAN = Plan(lanes=2, chunk=4)
BATCH, STEPS, RATE = 2, 3, 0.1

_rng = np.random.default_rng(7)
SIZES = np.concatenate([[5, 3, 6, 1, 4, 2, 5, 6], _rng.integers(1, ROWS + 1, NUM_CLIENTS - 8)])
FEATURES = _rng.normal(size=(NUM_CLIENTS, ROWS, WIDTH)).astype(np.float32)
TARGETS = _rng.normal(size=(NUM_CLIENTS, ROWS)).astype(np.float32)
START = np.array([0.5, -1.0, 2.0], np.float32)
COHORT = np.array([3, 17, 0, 5, 22, 8, 11, 1, 14, 6], np.int32)  # client 3 holds one example, 0 a partial last batch


def _read(parameters, id):
    return ClientData({"x": parameters["x"][id], "y": parameters["y"][id]}, parameters["mask"][id])


def ragged(*, sizes=SIZES, spoil: dict | None = None):
    """The population; `spoil` maps client ids to a value written over their features."""
    mask = np.arange(ROWS) < np.asarray(sizes)[:, None]
    x = np.where(mask[..., None], FEATURES, np.nan)
    for id, value in (spoil or {}).items():
        x[id] = value
    y = np.where(mask, TARGETS, np.nan)
    arrays = {"x": jnp.array(x, jnp.float32), "y": jnp.array(y, jnp.float32), "mask": jnp.array(mask)}
    return population.generated(len(mask), _read, arrays)


def linear_loss(params, examples, key):
    """Squared error of a linear model, one value per example."""
    return (examples["x"] @ params - examples["y"]) ** 2 / 2


def mlp_params(width: int = 4):
    """A small two-layer model."""
    rng = np.random.default_rng(3)
    return {"first": jnp.array(rng.normal(size=(WIDTH + 1, width)), jnp.float32), "second": jnp.ones(width)}


def mlp_loss(params, examples, key):
    """Logistic loss of the two-layer model on the sign of the target."""
    hidden = jnp.tanh(examples["x"] @ params["first"][1:] + params["first"][:1])
    return jnp.logaddexp(0.0, -(hidden @ params["second"]) * jnp.sign(examples["y"]))


def given(num_slots: int, *, num_clients: int = NUM_CLIENTS) -> Sampler:
    """A sampler whose state IS the cohort, so that one compiled program serves every cohort."""
    design = SamplingDesign(
        scheme="uniform_without_replacement",
        population_size=num_clients,
        cohort_size=num_slots,
        num_slots=num_slots,
    )
    return Sampler(lambda: cohort(np.arange(num_slots)), lambda key, state: (state, state), num_slots, design)


def cohort(ids, *, reported=True, invited=True, slots: int | None = None, padding_id: int = 9) -> Cohort:
    """A cohort of `ids`, with uninvited slots of another client's id behind them up to `slots`."""
    ids = np.asarray(ids, np.int32)
    extra = 0 if slots is None else slots - len(ids)
    invited = np.concatenate([np.broadcast_to(invited, ids.shape), np.zeros(extra, bool)])
    reported = np.concatenate([np.broadcast_to(reported, ids.shape), np.zeros(extra, bool)]) & invited
    ids = np.concatenate([ids, np.full(extra, padding_id, np.int32)])
    return Cohort(jnp.array(ids, jnp.int32), jnp.array(invited), jnp.array(reported))


def counting(work: ClientUpdate) -> ClientUpdate:
    """The same client, who remembers how often it took part and the sum of its updates."""

    def apply(key, broadcast, state, data):
        report, _ = work.apply(key, broadcast, (), data)
        total = sum(jnp.sum(x) for x in jax.tree.leaves(report.update))
        return report, {"rounds": state["rounds"] + 1, "sum": state["sum"] + total}

    def init(params):
        return {"rounds": jnp.zeros((), jnp.int32), "sum": jnp.zeros(())}

    return ClientUpdate(init, apply, ClientFacts(scalable=work.facts.scalable))


class Federation:
    """An algorithm compiled once, run on cohorts and populations given as data."""

    def __init__(self, *, num_slots=SLOTS, plan=PLAN, mesh=None, make=None, **parts):
        sampler = given(num_slots)
        if make is not None:
            self.algorithm = make(sampler, plan=plan, mesh=mesh)
        else:
            work = client.local_sgd(linear_loss, optax.sgd(RATE), client.work(num_steps=STEPS, batch_size=BATCH))
            parts = {
                "client": counting(work),
                "aggregator": aggregation.mean(),
                "server": server.optimizer(optax.sgd(1.0)),
            } | parts
            secret = noisy_parts(parts)
            parts |= {"nonfinite": "drop" if secret else "error"}
            self.algorithm = federated(sampler, **parts, plan=plan, mesh=mesh)
        self.num_slots = num_slots
        self._step = jax.jit(self.algorithm.step)

    def init(self, params=START, data=None):
        """The state before the first round."""
        data = ragged() if data is None else data
        return self.algorithm.init(jax.random.key(0), jax.tree.map(jnp.asarray, params), data)

    def run(self, who, data=None, params=START, *, num_rounds=2, seed=1, state=None, keys=None):
        """(state, [info]) after some rounds of the same cohort, on the host."""
        data = ragged() if data is None else data
        state = self.init(params, data) if state is None else state
        who = cohort(who, slots=self.num_slots) if not isinstance(who, Cohort) else who
        infos = []
        for i in range(num_rounds) if keys is None else keys:
            state = state._replace(sampler=who)
            state, info = self._step(jax.random.fold_in(jax.random.key(seed), i), state, data)
            infos.append(jax.device_get(info))
        return state, infos

    def params(self, *args, **kwargs) -> np.ndarray:
        """The flat model after `run`."""
        return flat(self.algorithm.params(self.run(*args, **kwargs)[0]))


def flat(tree) -> np.ndarray:
    """All leaves as one float64 vector."""
    return np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in jax.tree.leaves(tree)])


def digest(tree) -> str:
    """SHA-256 of every bit of a pytree."""
    words = hashlib.sha256()
    for x in jax.tree.leaves(tree):
        words.update(np.ascontiguousarray(x).tobytes())
    return words.hexdigest()


def outcome(state, infos):
    """What must not depend on slots: everything but the cohort itself."""
    return jax.device_get((state._replace(sampler=()), infos))
