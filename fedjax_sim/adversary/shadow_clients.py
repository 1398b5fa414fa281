"""Property inference with shadow clients: the share of a client's examples that have a property, from its message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.adversary.curious import View
from fedjax_sim.types import PyTree
from fedjax_sim.validate import Integer, NonNegativeInt, PositiveInt

RELATIVE_PENALTIES = tuple(10.0**power for power in range(-6, 3))


@validate.named_arguments
def property_share(
    view: View,
    predict: Callable,
    having: PyTree,
    lacking: PyTree,
    *,
    num_examples: PositiveInt,
    num_shadows: Annotated[int, Integer(4, 100_000)] = 128,
    seed: NonNegativeInt = 0,
) -> np.ndarray:
    """Estimates the share of each client's examples that have a property, with shadow clients of the attacker's own.

    A shadow client s holds `num_examples` of the attacker's examples, a share y_s of which has the property; the shares
    are spread evenly over [0, 1]. Its update u_s is simulated from the broadcast model. The estimate for a message u is
    the ridge regression of y on u: mean(y) + (y - mean(y))' (K + penalty I)^-1 k(u), where K and k hold the inner
    products of centred updates. The penalty is the one of 9 powers of ten with the least leave-one-out error.

    `property_score` needs no shadow clients: it takes one direction, along which all noise counts alike. The regression
    takes noise between clients into account.

    Args:
      view: what the attacker holds.
      predict: (broadcast, examples, {}) -> update, such as `local_steps` with the clients' options. Noise that clients
        add is for this function to simulate.
      having: dict of leaves [n, ...], the attacker's examples with the property.
      lacking: dict of leaves [k, ...], the attacker's examples without the property.
      num_examples: of a shadow client, at most n and at most k; about as many as clients hold.
      num_shadows: S.
      seed: of the draw of their examples.

    Returns: [m] float64 on the host, one estimate for each message. It is not cut off at 0 and 1, so that the order of
      extreme clients is kept.

    Raises: ValueError for more examples of a shadow client than there are, for updates or messages that are not finite,
      and for shadow clients whose updates are all equal.

    Guarantees: the shares of clients with a linear loss to within 5 points, with a lower error than any multiple of
    `property_score` where noise is larger along some directions
    (tests/adversary/test_shadow_clients.py::test_shares_are_estimated), and leave-one-out errors that equal refitting
    (::test_penalty_of_the_least_error).

    References: Ateniese et al. 2015; Melis et al. 2019, section 4.3; Allen 1974 (leave-one-out errors).
    """
    validate.part("view", view, View)
    num_having, num_lacking = (jax.tree.leaves(side)[0].shape[0] for side in (having, lacking))
    if num_examples > min(num_having, num_lacking):
        rule = f"at most {min(num_having, num_lacking)}, the attacker's examples of the smaller side"
        validate.fail("num_examples", rule, num_examples, "A shadow client draws without replacement.")
    shares, rows = _shadow_rows(num_having, num_lacking, num_examples, num_shadows, seed)
    own = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), having, lacking)

    def update_of(rows):
        return predict(view.broadcast, jax.tree.map(lambda x: x[rows], own), {})

    # One shadow client at a time: they are as large as the cohort's messages together.
    shadows = _matrix("predict", "updates", jax.lax.map(jax.jit(update_of), jnp.asarray(rows)))
    messages = _matrix("view", "messages", view.messages)
    mean_update = shadows.mean(0)
    centred = shadows - mean_update[None]
    if not centred.any():
        hint = "It returned the same one for every shadow client, so nothing tells of the property."
        validate.fail("predict", "updates that depend on the examples", "equal updates", hint)
    coefficients = _ridge(centred @ centred.T, shares - shares.mean())
    return shares.mean() + (messages - mean_update[None]) @ (centred.T @ coefficients)


def _shadow_rows(
    num_having: int, num_lacking: int, num_examples: int, num_shadows: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws the shares [S] of shadow clients and their rows [S, num_examples] of `having` and then `lacking`."""
    rng = np.random.default_rng(seed)
    counts = np.round(np.linspace(0, num_examples, num_shadows)).astype(int)
    rows = []
    for count in counts:
        with_property = rng.choice(num_having, count, replace=False)
        without = num_having + rng.choice(num_lacking, num_examples - count, replace=False)
        rows.append(rng.permutation(np.concatenate([with_property, without])))
    return counts / num_examples, np.stack(rows)


def _matrix(argument: str, name: str, rows: PyTree) -> np.ndarray:
    """Flattens leaves [m, ...] to float64 [m, d], and refuses numbers that are not finite."""
    leaves = [np.asarray(x, np.float64).reshape(x.shape[0], -1) for x in jax.tree.leaves(rows)]
    matrix = np.concatenate(leaves, axis=1)
    if not np.isfinite(matrix).all():
        validate.fail(argument, f"{name} of finite numbers", f"{(~np.isfinite(matrix)).sum()} that are not")
    return matrix


def _ridge(gram: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Solves (gram + penalty I) c = targets with the penalty of the least leave-one-out error.

    The regression has an intercept of its own, since rows and targets are centred; its leverage 1/S is added. With the
    eigenvalues l_j and eigenvectors V of the matrix, row s has the leverage h_s = 1/S + sum_j V_sj^2 l_j / (l_j +
    penalty), and the leave-one-out error penalty c_s / (1 - h_s).

    Args:
      gram: [S, S] float64, products of centred rows.
      targets: [S] float64, centred.

    Returns: c, [S] float64.
    """
    eigenvalues, vectors = np.linalg.eigh(gram)
    eigenvalues = np.maximum(eigenvalues, 0)
    projected = vectors.T @ targets
    scale = max(eigenvalues.max(), np.finfo(float).tiny)
    best_error, best = np.inf, np.zeros_like(targets)
    for penalty in scale * np.array(RELATIVE_PENALTIES):
        leverages = 1 / targets.size + np.square(vectors) @ (eigenvalues / (eigenvalues + penalty))
        coefficients = vectors @ (projected / (eigenvalues + penalty))
        errors = (penalty * coefficients) / np.maximum(1 - leverages, 1e-12)
        if np.square(errors).mean() < best_error:
            best_error, best = np.square(errors).mean(), coefficients
    return best
