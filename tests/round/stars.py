"""Federations of the laws' clients, for the tests of a round's steps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, sampling, server
from fedjax_sim.algorithms import federated
from fedjax_sim.types import Sampler
from tests.laws import problems as p

KEY = jax.random.key(3)


def local(**options):
    return client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(**({"num_steps": 2} | options)))


def star(sampler, **parts):
    parts = {"client": local(), "aggregator": aggregation.mean(), "server": server.optimizer(optax.sgd(1.0))} | parts
    return federated(sampler, **parts, plan=p.PLAN, mesh=None)


def started(algorithm):
    return algorithm.init(KEY, jnp.array(p.START), p.ragged())


def counted(amount, dtype=jnp.uint32):
    """Clients that report a count, in proportion to their size."""
    work = local()

    def apply(key, broadcast, state, data):
        report, state = work.apply(key, broadcast, state, data)
        return report._replace(counts={"inner_bytes": jnp.asarray(amount, dtype) * data.mask.sum(dtype=dtype)}), state

    return work._replace(apply=apply)


def loss_seeking(size, slots, told):
    """Invites the clients whose last loss was highest, unseen ones first: a sampler that learns."""

    def sample(key, state):
        cohort, _ = sampling.uniform(size, slots).sample(key, ())
        ids = jax.lax.top_k(state["loss"], slots)[1].astype(jnp.int32)
        return cohort._replace(ids=ids), state

    def observe(state, cohort, outcome):
        known = jnp.where(outcome.arrived, outcome.losses, state["loss"][cohort.ids])
        return state | {"loss": state["loss"].at[cohort.ids].set(known)}

    def tell(state, work):
        told.append(work)
        return state

    design = dataclasses.replace(sampling.uniform(size, slots).design, scheme="unknown_without_replacement")
    return Sampler(
        init=lambda: {"loss": jnp.full(size, jnp.inf)},
        sample=sample,
        num_slots=slots,
        design=design,
        tell=tell,
        observe=observe,
    )
