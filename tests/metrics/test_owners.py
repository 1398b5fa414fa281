"""`owner_*`: the model that each client would use, on its own rows, pooled alike for shared models and own ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import InvalidType, metrics, population
from fedjax_sim.types import ParamsKind
from tests.refusals import refused

ROWS = (3, 1, 4, 2)
rng = np.random.default_rng(0)
DATA = [{"x": rng.normal(size=(n, 2)).astype(np.float32), "y": rng.normal(size=n).astype(np.float32)} for n in ROWS]
CLIENTS = population.from_clients(DATA)
SHARED = {"w": jnp.array([0.3, -0.2])}
OWN = jnp.array(rng.normal(size=(4, 2)), jnp.float32)
NOT_JUDGED = [kind for kind in ParamsKind if not kind.is_judged]


def loss(params, examples, key):
    return jnp.square(examples["x"] @ params["w"] - examples["y"])


def pooled(models) -> float:
    """The mean over all rows of all clients, in NumPy."""
    losses = [np.square(rows["x"] @ np.asarray(w) - rows["y"]) for rows, w in zip(DATA, models, strict=True)]
    return float(np.concatenate(losses).mean())


def own_models(state, ids):
    return {"w": state[ids]}


def test_owners_are_judged_alike():
    """Catches a mean over trained clients alone, or over clients in place of rows, for one of the two kinds of models.

    Own models that equal the shared one have its `owner_loss`, so a difference of the two is paired.
    """
    shared = metrics.evaluation(loss, local_test=CLIENTS)(SHARED)
    np.testing.assert_allclose(shared["owner_loss"], pooled([SHARED["w"]] * 4), rtol=1e-6)
    assert shared["owner_loss"] == shared["local_test_loss"] and "personal_clients" not in shared

    def first_two(state, ids):
        return ids < 2

    judge = metrics.evaluation(loss, local_test=CLIENTS, personal=own_models, has_trained=first_two)
    own = judge(SHARED, OWN)
    np.testing.assert_allclose(own["owner_loss"], pooled(OWN), rtol=1e-6)
    assert own["personal_clients"] == 2 and own["owner_loss"] != own["personal_loss"]
    same = judge(SHARED, jnp.tile(SHARED["w"], (4, 1)))
    assert same["owner_loss"] == shared["owner_loss"]
    everybody = metrics.evaluation(loss, local_test=CLIENTS, personal=own_models)(SHARED, OWN)
    assert everybody["personal_clients"] == 4 and everybody["owner_loss"] == everybody["personal_loss"]

    def stepped(key, params, data):
        return {"w": params["w"] + 0.1}

    tuned = metrics.evaluation(loss, local_test=CLIENTS, owners=CLIENTS, adapt=stepped)(SHARED)
    np.testing.assert_allclose(tuned["owner_loss"], pooled([SHARED["w"] + 0.1] * 4), rtol=1e-6)
    assert tuned["local_test_loss"] == shared["local_test_loss"]


@pytest.mark.parametrize("kind", NOT_JUDGED, ids=lambda kind: kind.name)
def test_what_is_no_model_is_not_tested(kind):
    """Catches a test of FedProto's start, or of the first of IFCA's models, under the name of the model's test."""
    sets = {"test": DATA[0], "held_out": CLIENTS, "train": CLIENTS, "train_clients": 2, "triggered": DATA[0]}
    judge = metrics.evaluation(loss, **sets, local_test=CLIENTS, personal=own_models, params_kind=kind)
    record = judge(SHARED, OWN)
    assert all(name.startswith(("personal_", "owner_")) for name in record)
    np.testing.assert_allclose(record["owner_loss"], pooled(OWN), rtol=1e-6)
    assert metrics.evaluation(loss, **sets, params_kind=kind)(SHARED) == {}


def test_what_is_judged_keeps_its_names():
    """Catches a model, or params of an algorithm that says nothing, that are no longer tested."""
    kinds = [kind for kind in ParamsKind if kind.is_judged]
    found = [metrics.evaluation(loss, test=DATA[0], params_kind=kind)(SHARED)["test_loss"] for kind in kinds]
    assert len(kinds) == 4 and len(set(map(float, found))) == 1


def test_a_kind_is_a_member():
    """Catches an algorithm of a user's that states a text or None, which ended in an AttributeError."""
    for stated in ("the model", None, True):
        with refused("params_kind", value=stated, rule="ParamsKind", kind=InvalidType):
            metrics.evaluation(loss, test=DATA[0], params_kind=stated)


def test_owner_models_are_those_judged():
    """Catches another key, or rows of another client, in models that are exported than in those that were judged."""

    def noisy(key, params, data):
        return {"w": params["w"] + jax.random.normal(key, (2,)) + data.examples["y"].sum()}

    how = {"personal": own_models, "adapt": noisy, "owners": CLIENTS}
    models = metrics.owner_models(SHARED, OWN, jnp.arange(4), **how)
    record = metrics.evaluation(loss, local_test=CLIENTS, **how)(SHARED, OWN)
    np.testing.assert_allclose(record["owner_loss"], pooled(models["w"]), rtol=1e-5)


def test_owner_models_adapt_by_rows():
    """Catches models that shall adapt to rows which nobody gave, which ended in an AttributeError of None."""
    with refused("owners", value=None, rule="training rows"):
        metrics.owner_models(SHARED, OWN, jnp.arange(4), adapt=lambda key, params, data: params)
