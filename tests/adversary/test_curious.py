"""What a server holds: noise that it draws itself, noise of the clients, masks; and attacks that read nothing else."""

from __future__ import annotations

import ast
import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, aggregation, client, population, sampling, server, transform
from fedjax_sim.adversary import View
from fedjax_sim.algorithms import federated
from fedjax_sim.round.round import observe
from fedjax_sim.types import Observed
from tests.refusals import refused

KEY = jax.random.key(4)
CLIENTS = 30


def loss_fn(params, examples, key):
    return 0.5 * jnp.sum((examples["x"] - params["w"][None]) ** 2, -1)


def replayed(change, aggregator=None, scale=1.0):
    """(observed, updates as they were made, model before, model after) of one round."""
    values = scale * np.random.default_rng(0).normal(size=(CLIENTS, 200)).astype(np.float32)
    people = population.indexed({"x": values}, (np.arange(CLIENTS, dtype=np.int32), np.arange(CLIENTS + 1)))
    work = client.local_sgd(loss_fn, optax.sgd(0.1), client.work(num_steps=1, weighting="uniform"))
    step = server.optimizer(optax.sgd(1.0))
    aggregator = aggregation.fixed_mean(CLIENTS) if aggregator is None else aggregator
    made = federated(sampling.full(CLIENTS), work, aggregator, step, transform=change, mesh=None)
    state = made.init(KEY, {"w": jnp.zeros(200)}, people)
    after = made.params(jax.jit(made.step)(KEY, state, people)[0])
    seen = jax.jit(lambda state, people: observe(made, KEY, state, people))(state, people)
    return seen, 0.1 * values[np.asarray(seen.ids)], made.params(state), after


@pytest.mark.full
def test_who_sees_the_noise():
    """Central noise is drawn after the messages were received: the server's view has none, the released model has it.

    Fault: an attack on a central mechanism that is given what only others see, which would make it look safe.
    """
    seen, updates, before, after = replayed(transform.gaussian_mechanism(10.0, 0.5))
    np.testing.assert_allclose(adversary.each_message(seen).messages["w"], updates, rtol=1e-5, atol=1e-7)
    released = adversary.released_model(before, after)
    noise = np.asarray(released.messages["w"][0]) - updates.mean(0)
    assert noise.std() == pytest.approx(0.5 * 10 / CLIENTS, rel=0.25) and released.ids.tolist() == [-1]
    for change, std in (
        (transform.local_gaussian(10.0, 0.5), 5.0),
        (transform.distributed_gaussian(10.0, 0.5, CLIENTS), 5.0 / CLIENTS**0.5),
    ):
        seen, updates, _, _ = replayed(change)
        view = adversary.each_message(seen)
        assert np.std(np.asarray(view.messages["w"]) - updates) == pytest.approx(std, rel=0.05)


@pytest.mark.full
def test_masks_hide_everything():
    """Uniform on the ring (chi-square, 256 cells) whatever was sent, and the sum still right.

    Fault: masks that are added but once, that leave a bit of a message, or that do not reach the ring's ends.
    """
    secure = aggregation.secure_sum(aggregation.modular_sum(CLIENTS), 3, neighbours=4)
    for scale in (1.0, 5.0):
        change = transform.quantize(16, range=4.0, integers=True)
        seen, updates, before, after = replayed(change, secure, scale)
        unit = 4.0 / (2**15 - 1)
        released = adversary.released_model(before, after).messages["w"][0]
        np.testing.assert_allclose(released, updates.mean(0), atol=unit)
        with pytest.raises(TypeError, match="observed: expected messages of floats"):
            adversary.each_message(seen)
        words = np.asarray(adversary.masked_messages(seen, 1.0).messages["w"])
        counts = np.histogram(words, 256, (-(2.0**31), 2.0**31))[0]
        expected = words.size / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * (2 * 255) ** 0.5
    every = seen._replace(messages={"w": jnp.arange(16, dtype=jnp.uint32)[:, None]})
    small = adversary.masked_messages(every, 0.5, modulus_bits=4).messages["w"]
    assert set(np.unique(small)) == {x / 2 for x in range(-8, 8)}
    with pytest.raises(ValueError, match="observed: expected messages"):
        adversary.masked_messages(seen._replace(messages={"w": jnp.zeros((CLIENTS, 2, 5), jnp.uint32)}), 1.0)
    with pytest.raises(TypeError, match="observed: expected uint32"):
        adversary.masked_messages(seen._replace(messages={"w": jnp.zeros((CLIENTS, 1, 5), jnp.int32)}), 1.0)


def test_attacks_read_a_view_and_nothing_else():
    """Fault: an attack that is handed data, a population or a replay, or whose module could make one.

    What is beside a view is what a server has set or brings along: its model's loss, rates, candidates of its own.
    """
    attacks = ("affine_rows", "invert_affine", "gradient_rank", "recover_labels", "invert_by_optimization",
               "alignment_score", "property_score", "property_share")  # fmt: skip
    allowed = {
        "key", "view", "layer", "tolerance", "num_examples", "learning_rate", "probabilities", "predict", "start",
        "known", "objective", "regularizer", "num_steps", "optimizer", "num_restarts", "loss_fn", "candidates",
        "having", "lacking", "num_shadows", "seed",
    }  # fmt: skip
    for name in attacks:
        parameters = inspect.signature(getattr(adversary, name)).parameters
        assert "view" in parameters and set(parameters) <= allowed, name
    assert set(View._fields) == set(Observed._fields)
    for name in ("inversion", "descent", "membership", "shadow_clients"):
        source = pathlib.Path(inspect.getfile(adversary)).parent / f"{name}.py"
        nodes = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.ImportFrom)]
        imported = {f"{node.module}.{x.name}" for node in nodes for x in node.names if "fedjax_sim" in node.module}
        assert not [x for x in imported if "population" in x or "observe" in x.lower()], name


def test_wrong_views():
    """Fault: an observation taken for a view, with whatever the aggregator hides."""
    seen = Observed(
        {"w": np.zeros(200)}, {"w": np.ones((CLIENTS, 200), np.float32)}, np.ones(CLIENTS), np.arange(CLIENTS)
    )
    for attack in (adversary.invert_affine, adversary.gradient_rank, adversary.recover_labels):
        with pytest.raises(TypeError, match="view: expected"):
            attack(seen)
    with refused("layer", rule="path"):
        adversary.invert_affine(adversary.each_message(seen), "hidden_0")
    with refused("layer", rule="bias"):
        adversary.invert_affine(adversary.each_message(seen))
    with pytest.raises(TypeError, match="observed: expected"):
        adversary.each_message(adversary.each_message(seen))
