"""What the `params` of an algorithm are: stated for every algorithm, and true of what its rounds do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import algorithms, server, types
from fedjax_sim.types import ParamsKind
from tests.laws import cases, problems as p

pytestmark = pytest.mark.optimised(False)  # these laws do not depend on the compiler

# The kinds are those of the rows in `cases.py`, most of which are models; one of these stands for all.
NO_MODELS = cases.named("algorithms", lambda row: row.params_kind is not ParamsKind.MODEL and row.params_at_server)


@pytest.mark.every_row
def test_every_algorithm_states_what_its_params_are():
    """Catches a new algorithm, or a wrapper, that leaves it open, and one that calls something else the model."""
    stated = {name: row().params_kind for name, row in cases.CASES["algorithms"].items()}
    assert stated == {name: cases.CASES["algorithms"][name].params_kind for name in stated}


@pytest.mark.every_row
def test_every_server_states_what_its_params_are():
    """Catches a wrapper of `server` that forgets what the wrapped server's params are."""
    for name, row in cases.CASES["server"].items():
        made = row()
        if isinstance(made, types.ServerUpdate):
            assert made.params_kind is row.params_kind, name


def test_a_federation_of_personal_clients_has_their_kind():
    """Catches a cloud that calls the shared part of its edges' clients the model."""
    edge = cases.CASES["algorithms"]["fedper"]().parts
    above = algorithms.federated(
        cases.SAMPLER, algorithms.as_client_update(edge), edge.aggregator, server.replacement(), **cases.RUN
    )
    assert above.params_kind is ParamsKind.PART


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedbabu"])
def test_edges_that_gossip_have_their_clients_kind(name):
    """Catches the mean of edges' untrained parts, which was tested and exported as the mean of their models."""
    row = cases.CASES["algorithms"][name]
    stated = algorithms.hierarchical_gossip(row().parts, np.full((2, 2), 0.5)).params_kind
    assert stated is (ParamsKind.MEAN if row.params_kind is ParamsKind.MODEL else row.params_kind)


@pytest.mark.default_rows("fedper")
@pytest.mark.parametrize("name", [*NO_MODELS, "fedavg"])
def test_params_are_what_is_stated(name):
    """Catches a start that a round trains, a part without an untrained rest, and a first model of many that is not.

    A part or a start keeps some array of the start, bit for bit, while its clients' own models have changed it.
    """
    row, data = cases.CASES["algorithms"][name], p.ragged()
    made = row()
    kind, evaluated, step = made.params_kind, made.evaluated, jax.jit(made.step)

    def params_of(state):
        """The algorithm's own `params`: a row's are what the other laws see."""
        return jax.device_get(made.params(state) if made.parts is None else made.parts.server.params(state.server))

    state = made.init(jax.random.key(0), p.START, data)
    start = params_of(state)
    for number in range(3):
        state, _ = step(jax.random.fold_in(jax.random.key(1), number), state, data)
    params = params_of(state)
    kept = [np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (start, params)), strict=True)]
    assert all(kept) if kind is ParamsKind.UNTRAINED else not all(kept)
    assert (evaluated.models is not None) == (kind is ParamsKind.ONE_OF)
    if kind is ParamsKind.MODEL:
        assert not any(kept)
    if not kind.is_judged:
        assert evaluated.personal is not None or evaluated.adapt is not None
    everybody = jnp.arange(p.NUM_CLIENTS)
    own = None if evaluated.personal is None else jax.device_get(evaluated.personal(state, everybody))
    if kind is ParamsKind.UNTRAINED:
        assert any((x != y[None]).any() for x, y in zip(*map(jax.tree.leaves, (own, params)), strict=True))
    if kind is ParamsKind.PART:
        untrained = [x for x, is_kept in zip(jax.tree.leaves(own), kept, strict=True) if is_kept]
        assert untrained and any((x != x[:1]).any() for x in untrained)
    if kind is ParamsKind.ONE_OF:
        models, count = evaluated.models(state)
        assert 1 <= count <= jax.tree.leaves(models)[0].shape[0]
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y), models, params)
        for leaf, of_clients in zip(*map(jax.tree.leaves, (models, own)), strict=True):
            assert all((leaf[:count] == x[None]).all(tuple(range(1, leaf.ndim))).any() for x in of_clients)
    if kind is ParamsKind.MEAN and own is not None and row.plain_mean:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x.mean(0), y, rtol=1e-5, atol=1e-6), own, params)
