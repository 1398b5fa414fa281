"""FedAMP: the server mixes the clients' models, and each client trains near a mixture of its own."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, tree
from fedjax_sim.algorithms.personal.local import LocalTrainingOptions
from fedjax_sim.round.bases import Bases, starting_from
from fedjax_sim.round.compatibility import check_distinct
from fedjax_sim.round.costs import metrics_of
from fedjax_sim.round.round import close, collect, invite
from fedjax_sim.round.state import initial_state
from fedjax_sim.transform import identity
from fedjax_sim.types import Algorithm, Array, Evaluated, Execution, ParamsKind, PyTree, Sampler, ServerUpdate, Star
from fedjax_sim.validate import LossFn, NonNegative, Positive, Share, named_arguments


class MixedModels(NamedTuple):
    """The server's state."""

    models: PyTree  # leaves [N, ...], each client's local model at the end of its last round
    mixtures: PyTree  # leaves [N, ...], what each client receives next
    has_trained: Array  # [N] bool; a message of the client has arrived


@named_arguments
def fedamp(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    share: Share = 0.5,
    width: Positive = 1.0,
    coefficient: NonNegative = 0.1,
    **options: Unpack[LocalTrainingOptions],
) -> Algorithm:
    """Makes FedAMP: clients whose models are near each other attract each other.

    With w_i the last local model of client i of N, its mixture is u_i = w_i + sum_(j != i) a_ij (w_j - w_i), where
    a_ij = share / (N - 1) exp(-|w_i - w_j|^2 / width). In a round the client receives u_i, and trains from there on
    f_i(w) + (coefficient / 2) |w - u_i|^2, which gives its next w_i. In the paper's notation sigma is `width`, the
    attraction is A(x) = 1 - exp(-x / sigma), alpha is share sigma / (N - 1), and lambda is coefficient alpha. With a
    share of at most 1 every mixture is a convex combination, whatever the models.

    Args:
      loss_fn, sampler, optimizer: as in `fedavg`.
      share: of other clients' models in a mixture, at the most, in [0, 1]; 0 is training on own
        rows alone, near the last own model.
      width: > 0, the squared distance of two models at which their attraction has fallen to 1 / e.
      coefficient: >= 0, of the pull to the mixture.
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`. Clients count alike in a mixture.
      nonfinite, plan, mesh: as in `federated`. There is no transform, downlink or other aggregator: the server compares
        all models as they are, and so sees each of them. No epsilon covers that.

    Clients that have never taken part attract nobody; their own mixture is that of the start model and the others'. A
    client that is absent keeps its w_i at the server. The server keeps two models a client, and compares all pairs in
    each round: N^2 d operations. The paper solves the local problem from any start; here it starts from u_i.

    Returns: an Algorithm. There is no shared model: `params` is the model of the first client. A client's own model is
    w_i, and before it has trained that is the start model.

    Raises: ValueError for a sampler with replacement.

    Guarantees: models match NumPy where some clients take part in a round (tests/algorithms/personal/test_fedamp.py::
    test_matches_numpy); without share and coefficient it is `local` up to the rounding of w = u + (w - u)
    (::test_without_a_share_it_is_local_training); groups far apart do not meet (::test_groups_far_apart); each client
    is counted one model in both directions (::test_matches_numpy).

    References: Huang et al. 2021 (FedAMP), algorithm 1.
    """
    check_distinct(sampler, "A client has one model at the server.")
    work, execution = client.local_work({**options, "weighting": "uniform"})
    population_size = sampler.design.population_size

    def rule(key, updates, weights, ids, round):
        arrived = weights > 0
        place = jnp.where(arrived, ids, population_size)  # outside: nothing is written

        def of_everybody(x):
            return jnp.zeros((population_size, *x.shape[1:]), x.dtype).at[place].set(x, mode="drop")

        return {"updates": jax.tree.map(of_everybody, updates), "arrived": of_everybody(arrived)}, ()

    star = Star(
        sampler=sampler,
        client=client.proximal(loss_fn, optimizer, coefficient, work),
        aggregator=aggregation.gather(rule, start=lambda update_spec: (), weighted=False),
        server=_mixing_server(population_size, share, width),
        transform=identity(),
        execution=Execution(**execution),
    )

    def init(key, params, population):
        return initial_state(star, params, population)

    def step(key, state, population):
        cohort, sampler_state = invite(star, key, state)
        bases = starting_from(Bases(state.server.mixtures, cohort.ids))
        gathered = collect(star, key, cohort, state, population, extension=bases)
        return close(star, key, cohort, gathered, state._replace(sampler=sampler_state))

    return Algorithm(
        init,
        step,
        lambda state: star.server.params(state.server),
        star,
        evaluated=Evaluated(
            lambda state, ids: tree.take_rows(state.server.models, ids),
            has_trained=lambda state, ids: state.server.has_trained[ids],
            models=lambda state: (state.server.models, jnp.int32(population_size)),
        ),
        metrics=metrics_of(star),
        params_kind=star.params_kind,
    )


def _mixing_server(population_size: int, share: float, width: float) -> ServerUpdate:
    """Makes the server that keeps and mixes one model of each client.

    Args:
      population_size: N. The aggregate is {"updates": leaves [N, ...], each a local model less its mixture, "arrived":
        [N] bool}.
      share, width: as in `fedamp`.

    Returns: a ServerUpdate whose broadcast and `params` are the first client's mixture and model: each client is sent
    a row of `mixtures` (`Bases`).
    """

    def copies(params: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.tile(x[None], (population_size, *(1 for _ in x.shape))), params)

    def init(params):
        return MixedModels(copies(params), copies(params), jnp.zeros(population_size, bool))

    def apply(key, aggregate, state):
        arrived = aggregate["arrived"]
        trained = jax.tree.map(jnp.add, state.mixtures, aggregate["updates"])
        models = tree.where(arrived, trained, state.models)
        has_trained = state.has_trained | arrived
        return MixedModels(models, _mixtures(models, has_trained, share, width), has_trained)

    def takes(params):
        return {"updates": jax.eval_shape(copies, params), "arrived": jax.ShapeDtypeStruct((population_size,), bool)}

    return ServerUpdate(
        init=init,
        broadcast=lambda state: jax.tree.map(lambda x: x[0], state.mixtures),
        apply=apply,
        params=lambda state: jax.tree.map(lambda x: x[0], state.models),
        takes=takes,
        params_kind=ParamsKind.ONE_OF,
    )


def _mixtures(models: PyTree, has_trained: Array, share: float, width: float) -> PyTree:
    """Returns u_i = w_i + sum_(j != i) a_ij (w_j - w_i) of all clients, leaves [N, ...].

    Args:
      models: w, leaves [N, ...].
      has_trained: [N] bool; the others attract nobody.
      share, width: as in `fedamp`.
    """
    number = has_trained.shape[0]
    flat = jnp.concatenate([x.reshape(number, -1).astype(jnp.float32) for x in jax.tree.leaves(models)], 1)

    def mixture(i):  # differences, because a product of the models would lose the digits of a small distance
        squared_distances = jnp.square(flat - flat[i][None]).sum(1)
        is_other = has_trained & (jnp.arange(number) != i)
        attraction = share / max(number - 1, 1) * jnp.exp(-squared_distances / width)
        weights = jnp.where(is_other, attraction, 0)
        return jax.tree.map(lambda x: x[i] + jnp.tensordot(weights.astype(x.dtype), x - x[i][None], 1), models)

    return jax.lax.map(mixture, jnp.arange(number))
