"""Clients' own models, for every algorithm that has them: whose model it is, and who has one."""

from __future__ import annotations

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidArgument, client
from tests.laws import cases, problems as p
from tests.laws.test_options import given, recipe_of

pytestmark = pytest.mark.optimised(False)  # these laws do not depend on the compiler

HAVING = cases.named("algorithms", lambda row: row.own_models)
EVERYBODY = np.arange(p.NUM_CLIENTS)


@pytest.mark.every_row
def test_every_algorithm_with_own_models_has_a_row():
    """Catches a new algorithm with own models that these laws do not see."""
    for name, row in cases.CASES["algorithms"].items():
        has_own = row().evaluated.personal is not None
        assert row.own_models == has_own, f"state own_models={has_own} in the row {name!r} of tests/laws/cases.py"


@pytest.mark.default_rows("fedper")
@pytest.mark.parametrize("name", HAVING)
def test_own_models_stand_by_id(name):
    """Catches rows by place in place of id, a newcomer that is told as trained, and one that is forgotten again."""
    made, data = cases.CASES["algorithms"][name](), p.ragged()
    evaluated, step = made.evaluated, jax.jit(made.step)
    models = jax.jit(evaluated.personal)
    state = made.init(jax.random.key(0), p.START, data)
    known = evaluated.has_trained or (lambda state, ids: jnp.ones(len(ids), bool))
    before = known(state, EVERYBODY)
    for number in range(2):
        state, _ = step(jax.random.fold_in(jax.random.key(1), number), state, data)
        own, after = models(state, EVERYBODY), np.asarray(known(state, EVERYBODY))
        for leaf in jax.tree.leaves(own):
            assert leaf.shape[0] == p.NUM_CLIENTS and np.isfinite(leaf).all()
        backwards = models(state, EVERYBODY[::-1])
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[::-1]), own, backwards)
        if evaluated.has_trained is not None:
            assert (after | ~np.asarray(before)).all() and after.sum() > np.sum(before)
            assert after.sum() <= (number + 1) * p.SLOTS or after.all()
            newcomers = np.flatnonzero(~after)
            for leaf in jax.tree.leaves(own):
                np.testing.assert_array_equal(
                    leaf[newcomers], np.asarray(leaf)[newcomers[:1]].repeat(newcomers.size, 0)
                )
        before = after


def optimizers_of(name):
    """The arguments of a recipe that are optimizers."""
    hints = typing.get_type_hints(recipe_of(name))
    kinds = {argument: (hint, *typing.get_args(hint)) for argument, hint in hints.items()}
    return [argument for argument, kind in kinds.items() if optax.GradientTransformation in kind]


@pytest.mark.default_rows("fedmd")
@pytest.mark.parametrize("name", [name for name in HAVING if optimizers_of(name)])
def test_every_rate_may_fall_over_rounds(name):
    """Such a rate trains, or it is refused by name when the algorithm is made.

    Catches clients who are not told the round, because one of their optimizers alone looks at it.
    """
    falling = client.over_rounds(optax.sgd, optax.exponential_decay(p.RATE, 1, 0.5))
    for argument in optimizers_of(name):
        try:
            with given(recipe_of(name), **{argument: falling}):
                made = cases.CASES["algorithms"][name]()
        except InvalidArgument as error:
            assert error.argument == argument and "does not fall over rounds" in error.rule
            continue
        state = jax.eval_shape(lambda made=made: made.init(jax.random.key(0), jnp.array(p.START), p.ragged()))
        # A rate that falls is an error where no round is told.
        jax.eval_shape(made.step, jax.random.key(1), state, p.ragged())
