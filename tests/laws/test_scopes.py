"""A user's `jax.named_scope` and source lines stand in the round's program, where profilers look for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.sweeps import traced_hyperparameters
from tests.laws import cases, problems as p

SCOPE = "loss_of_a_user"


@pytest.fixture
def scoped(monkeypatch):
    monkeypatch.setattr(p, "linear_loss", jax.named_scope(SCOPE)(p.linear_loss))
    monkeypatch.setattr(cases, "squared_error", jax.named_scope(SCOPE)(cases.squared_error))
    monkeypatch.setattr(cases, "three_logits", jax.named_scope(SCOPE)(cases.three_logits))


def traced(name: str):
    """The traced round of a row, or what it does before the rounds."""
    row, start = cases.CASES["algorithms"][name], (jax.random.key(0), jnp.array(p.START), p.ragged())
    algorithm = row()
    if not row.trains_in_rounds:
        return jax.jit(algorithm.init).trace(*start)
    state = jax.eval_shape(algorithm.init, *start)
    return jax.jit(algorithm.step).trace(start[0], state, start[2])


@pytest.mark.default_rows("fedadam")
@pytest.mark.parametrize("name", cases.compiled_rows("algorithms", lambda row: row.trains))
def test_a_users_scope_stands_in_every_round(name, scoped):
    """Catches a program that is evaluated again, equation by equation, without the scopes that it was traced in."""
    assert SCOPE in traced(name).lower().as_text(debug_info=True)


@pytest.fixture
def own_programs():
    """No compiled program is taken from a folder whose keys leave out scopes and lines."""
    option = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    yield
    jax.config.update(option, before)


@pytest.mark.full
def test_scopes_and_lines_stand_in_the_compiled_round(scoped, own_programs):
    """Catches scopes that lowering keeps and compiling loses, and the rewriter's source lines for the loss's."""
    text = traced("fedavg").lower().compile().as_text()
    assert SCOPE in text and "problems.py" in text


def test_a_sweep_keeps_scopes():
    """Floats that become arguments, inside of a loop too. Catches the scopes of either left out."""

    def powers(x, factor):
        with jax.named_scope("outside"):
            x = x * factor

        def turn(x, _):
            with jax.named_scope("inside"):
                return jnp.sin(x) * factor, None

        return jax.lax.scan(turn, x, None, length=3)[0]

    x = jnp.ones(2)
    point, _ = traced_hyperparameters.traced_program(lambda x: powers(x, np.float32(0.3)), x)
    other, _ = traced_hyperparameters.traced_program(lambda x: powers(x, np.float32(0.7)), x)
    floats = traced_hyperparameters.lifted([point, other])
    given = [None if column is None else jnp.asarray(column[0]) for column in floats]
    assert any(x is not None for x in given)
    text = (
        jax.jit(lambda x, given: traced_hyperparameters.replay(point, given, x))
        .lower(x, given)
        .as_text(debug_info=True)
    )
    assert "outside" in text and "inside" in text
