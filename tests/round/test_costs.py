"""What samplers are told of a client's local work."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, client, population, sampling, server, transform
from fedjax_sim.round.costs import work_of
from fedjax_sim.types import Star

ROWS, WIDTH, BATCH = 12, 6, 4
ONE = 3 * 2 * WIDTH  # of a row: forward, and the gradient's product with x
PEOPLE = population.stored(
    {"x": np.ones((3 * ROWS, WIDTH), np.float32), "y": np.ones(3 * ROWS, np.float32)}, np.arange(4) * ROWS
)


def loss(params, examples, key):
    return (examples["x"] @ params - examples["y"]) ** 2


def told(local):
    star = Star(
        sampling.uniform(3, 2), local, aggregation.mean(), server.optimizer(optax.sgd(1.0)), transform.identity()
    )
    return work_of(star, jnp.zeros(WIDTH), PEOPLE)


@pytest.mark.parametrize(
    "work, rows, steps",
    [
        ({"num_steps": 3, "batch_size": BATCH}, BATCH, 3),  # few steps: written out where nobody asks for a part
        ({"num_steps": 50, "batch_size": BATCH}, BATCH, 50),
        ({"num_epochs": 2, "batch_size": BATCH}, BATCH, 6),
        ({"num_steps": 5}, ROWS, 5),
        ({"num_steps": 1}, ROWS, 1),
    ],
)
def test_operations_by_hand(work, rows, steps):
    """A linear model: two products of 2 rows * width a step, and a few operations more on each number.

    Catches steps that are counted once, or all of them as one, and rows of the wrong batch.
    """
    found = told(client.local_sgd(loss, optax.sgd(0.1), client.work(**work)))
    assert (found.steps(ROWS) if callable(found.steps) else found.steps) == steps
    assert found.rows == (None if "batch_size" in work else ROWS)
    products = 4 * rows * WIDTH
    one = found.flops if steps == 1 else found.step_flops
    assert products <= one <= products + 8 * rows + 6 * WIDTH + 20
    assert found.flops <= one + 4 * WIDTH + 20


def test_a_term_of_zero_costs_nothing():
    """Catches FedAsync and FedAT without a proximal term in the simulated time of one with it."""
    for work in ({"num_steps": 3, "batch_size": BATCH}, {"num_epochs": 2}):
        given = loss, optax.sgd(0.1)
        plain, none, some = (
            told(make)._replace(steps=None, examples=None)
            for make in (
                client.local_sgd(*given, client.work(**work)),
                client.proximal(*given, 0.0, client.work(**work)),
                client.proximal(*given, 0.1, client.work(**work)),
            )
        )
        assert none == plain and some.step_flops >= plain.step_flops + 3 * WIDTH


def test_loops_of_known_length():
    """Clients who do not stop early: their whole loop counts. Catches DP-SGD as one step."""
    options = {"num_examples": ROWS, "batch_size": BATCH}
    short, long = (told(client.private_sgd(loss, 1.0, 0.0, 0.1, num_steps=steps, **options)) for steps in (4, 40))
    assert short.step_flops == long.step_flops == 0 and long.steps is None
    np.testing.assert_allclose(long.flops / short.flops, 10, rtol=0.1)


def test_a_loop_that_nobody_knows_is_refused():
    """Catches 30 steps that are priced as one, because a client of a user's own does not state how many it takes."""
    known = client.local_sgd(loss, optax.sgd(0.1), client.work(num_epochs=10, batch_size=BATCH))
    unknown = known._replace(facts=known.facts._replace(all_steps=None, num_steps=None))
    with pytest.raises(ValueError, match=r"client: expected one whose number of local steps is known.*all_steps"):
        told(unknown)
    written_out = client.local_sgd(loss, optax.sgd(0.1), client.work(num_steps=3, batch_size=BATCH))
    told(written_out._replace(facts=written_out.facts._replace(all_steps=None, num_steps=None)))
