"""What samplers are told of a client's local work, and the plans that fit it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, client, engine, models, population, sampling, server, transform
from fedjax_sim.algorithms import federated
from fedjax_sim.round.costs import plan_of, work_of
from fedjax_sim.types import Execution, Star
from tests.laws import problems as p
from tests.refusals import refused
from tests.round.stars import KEY, loss_seeking, star

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
    with refused("client", rule="local steps", hint="all_steps"):
        told(unknown)
    written_out = client.local_sgd(loss, optax.sgd(0.1), client.work(num_steps=3, batch_size=BATCH))
    told(written_out._replace(facts=written_out.facts._replace(all_steps=None, num_steps=None)))


def test_quadratic_clients_have_known_work():
    """Catches bytes or steps of another part in what samplers are told."""
    told = []
    people = population.quadratic_population([1.0] * 4, [0.0, 1.0, 2.0, 3.0])
    sampler = loss_seeking(4, 2, told)
    work = client.local_sgd(population.quadratic_loss, optax.sgd(0.1), client.work(num_epochs=3, batch_size=1))
    change = {"transform": transform.quantize(8), "downlink": transform.quantize(8)}
    made = federated(sampler, work, aggregation.total(), server.optimizer(optax.sgd(1.0)), **change, mesh=None)
    made.init(KEY, {"w": jnp.zeros(1)}, people)
    assert told[0].bytes_up == told[0].bytes_down < 8 and int(told[0].steps(5)) == 15


def test_plans_fit_the_work():
    """Catches lanes by the message alone, where larger minibatches fill the cache, and by the devices."""

    def lanes(batch_size, mesh=None):
        work = client.local_sgd(p.mlp_loss, optax.sgd(0.1), client.work(num_steps=2, batch_size=batch_size))
        made = star(sampling.uniform(100, 64), client=work)
        rows = {"x": np.zeros((100 * 512, p.WIDTH), np.float32), "y": np.zeros(100 * 512, np.float32)}
        people = population.stored(rows, np.arange(101) * 512)
        return plan_of(made.parts._replace(execution=Execution(mesh=mesh)), p.mlp_params(), people).lanes

    assert lanes(4) > lanes(256) >= 1
    assert lanes(4) == lanes(4, engine.device_mesh(2))


def test_plans_of_convolutions():
    """Catches lanes of clients on a CPU, where their convolutions would be slow, and lanes that accelerators lose."""
    model = models.cnn(input_shape=(8, 8, 32), num_outputs=3, channels=(4,))
    loss = models.supervised(model, models.softmax_cross_entropy)
    work = client.local_sgd(loss, optax.sgd(0.1), client.work(num_steps=1))
    rows = {"x": np.zeros((100, 8, 8, 32), np.float32), "y": np.zeros(100, np.int32)}
    people = population.stored(rows, np.arange(101))
    made = star(sampling.full(100), client=work).parts
    params, _ = jax.eval_shape(model.init, KEY)
    assert plan_of(made, params, people) == engine.Plan(1, 1)
    with engine.compiling_for("cuda"):
        assert plan_of(made, params, people).lanes == 100
