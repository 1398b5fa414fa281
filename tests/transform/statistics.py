"""Messages drawn many times, against what a transform declares of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

TRIALS = 20_000


def updates() -> dict[str, np.ndarray]:
    """Uniform, Gaussian, sparse, on the grid of quarters, and partly out of [-1, 1]."""
    rng = np.random.default_rng(5)
    sparse = np.zeros(64)
    sparse[[3, 17, 40]] = 0.9, -0.2, 0.01
    rows = {
        "uniform": rng.uniform(-1, 1, 64),
        "gaussian": rng.normal(size=64) * 0.2,
        "sparse": sparse,
        "on the grid": rng.integers(-4, 5, 64) / 4,
        "out of range": rng.normal(size=64) * 1.5,
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


def split(rows):
    """[..., 64] as an update of two leaves."""
    return {"matrix": rows[..., :48].reshape(*rows.shape[:-1], 8, 6), "vector": rows[..., 48:]}


def joined(message) -> np.ndarray:
    """The inverse of `split`."""
    matrix, vector = (np.asarray(message[name], np.float64) for name in ("matrix", "vector"))
    return np.concatenate([matrix.reshape(*vector.shape[:-1], 48), vector], axis=-1)


@functools.lru_cache(maxsize=4)
def draws(transform, trials: int = TRIALS) -> dict[str, np.ndarray]:
    """[trials, 64] messages as they arrive, for each update."""
    rows = updates()

    @jax.jit
    def all_draws(keys, rows):
        one = lambda key, row: transform.on_client(key, split(row), (), ())[0]  # noqa: E731
        return jax.vmap(lambda row: jax.vmap(one, (0, None))(keys, row))(rows)

    sent = joined(all_draws(jax.random.split(jax.random.key(11), trials), jnp.stack(list(rows.values()))))
    return dict(zip(rows, sent, strict=True))


def check_mean(sent: np.ndarray, expected: np.ndarray) -> None:
    """The mean of draws [trials, d] is the expected one.

    Six deviations, and twenty jumps for numbers that rarely move: a true mean fails with probability below 1e-6, a bias
    of 6 % of a level at one number of 64 is found.
    """
    trials = len(sent)
    jump = np.abs(sent - expected).max()
    limit = 6 * sent.std(0) / np.sqrt(trials) + 20 * jump / trials + 4e-6 * np.abs(expected).max()
    assert (np.abs(sent.mean(0) - expected) <= limit).all()


def check_error(sent: np.ndarray, update: np.ndarray, declared: float, slack: float = 2e-5) -> None:
    """The mean squared error of draws [trials, d] is the declared one: six deviations, and float32's rounding."""
    errors = np.square(sent - update).sum(-1)
    limit = 6 * errors.std() / np.sqrt(len(errors)) + slack * declared + 1e-12
    assert abs(errors.mean() - declared) <= limit, (errors.mean(), declared, limit)
