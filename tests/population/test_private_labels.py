"""Randomised response of labels: its law and its epsilon."""

from fractions import Fraction
from math import exp, isqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import population
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.private_labels import keep_threshold, kept_share

ROWS, CLASSES = 40_000, 5
LABELS = np.arange(ROWS) % CLASSES


client_of = jax.jit(lambda people, id: people.client(id))


def data(clients=2, task="classification"):
    own = [{"x": np.full((ROWS // clients, 1), i, np.float32), "y": LABELS[i::clients].astype(np.int32)}
           for i in range(clients)]  # fmt: skip
    train = population.from_clients(own)
    return FederatedData(
        train=train,
        test={"x": own[0]["x"], "y": own[0]["y"]},
        held_out=None,
        input_shape=(1,),
        num_outputs=CLASSES,
        task=task,
    )


def test_shares():
    """Each label's law within 6 deviations (2e-9), and twice the epsilon rejected. Catches a kept label that may be
    drawn again, another law for some labels, draws that clients share, and features that change."""
    epsilon = 1.2
    noisy = population.with_private_labels(data(), epsilon=epsilon)
    clients = [jax.device_get(client_of(noisy.train, np.int32(i))) for i in range(2)]
    told = np.concatenate([np.asarray(c.examples["y"]) for c in clients])
    own = np.concatenate([LABELS[i::2] for i in range(2)])
    kept, each = kept_share(epsilon, CLASSES), ROWS // CLASSES
    for label in range(CLASSES):
        counts = np.bincount(told[own == label], minlength=CLASSES)
        law = np.where(np.arange(CLASSES) == label, kept, (1 - kept) / (CLASSES - 1))
        assert (abs(counts - each * law) < 6 * np.sqrt(each * law * (1 - law))).all()
        assert abs(counts[label] - each * kept_share(2 * epsilon, CLASSES)) > 6 * isqrt(each)
    flips = [np.asarray(c.examples["y"]) != LABELS[i::2] for i, c in enumerate(clients)]
    assert (flips[0] != flips[1]).mean() > 0.1
    assert all((c.examples["x"] == i).all() for i, c in enumerate(clients))
    again = client_of(population.with_private_labels(data(), epsilon=epsilon).train, np.int32(0))
    assert (again.examples["y"] == clients[0].examples["y"]).all()
    other = client_of(population.with_private_labels(data(), epsilon=epsilon, seed=1).train, np.int32(0))
    assert (other.examples["y"] != clients[0].examples["y"]).any()
    assert (noisy.test["y"] == data().test["y"]).all()


@pytest.mark.parametrize("classes", [2, 3, 10, 1000, 2**20])
@pytest.mark.parametrize("epsilon", [0.001, 0.01, 1.0, 3.0, 20.0])
def test_epsilon_is_exact(epsilon, classes):
    """Of all 2^64 draws: the odds of any two chances of one label told. Catches a share that is rounded up, and others
    that are not alike where epsilon is small."""
    kept = keep_threshold(epsilon, classes)
    each, left = divmod(2**32, classes - 1)
    others = [Fraction(2**32 - kept, 2**32) * Fraction(n, 2**32) for n in (each, each + (left > 0))]
    chances = [Fraction(kept, 2**32), *others[: classes - 1]]  # of two classes there is one other
    assert max(chances) <= min(chances) * Fraction(exp(epsilon))
    assert kept / 2**32 == pytest.approx(kept_share(epsilon, classes), rel=1e-6 + classes * 2.0**-30)


def test_padding():
    """Catches draws by row instead of by example."""
    ragged = population.from_clients(
        [{"x": np.zeros((n, 1), np.float32), "y": np.arange(n, dtype=np.int32) % 5} for n in (3, 300)]
    )
    one = {"x": np.zeros((1, 1), np.float32), "y": np.zeros(1, np.int32)}
    clean = FederatedData(train=ragged, test=one, held_out=None, input_shape=(1,), num_outputs=5, task="classification")
    train = population.with_private_labels(clean, epsilon=0.5).train
    whole = client_of(train, np.int32(0))
    rows = train.capacities[0] if train.capacities else 300
    few = client_of(train.capped(rows), np.int32(0)) if train.capacities else whole
    told = [np.asarray(x.examples["y"])[np.asarray(x.mask)] for x in (whole, few)]
    np.testing.assert_array_equal(*told)
    assert jax.jit(lambda p: p.count(jnp.int32(1)))(train) == 300 and train.sizes.tolist() == [3, 300]


def test_what_is_refused():
    """Catches targets that are no labels, and epsilons that are none."""
    for epsilon in (0.0, -1.0, float("nan"), 21.0, 1e-9):
        with pytest.raises(ValueError, match="epsilon"):
            population.with_private_labels(data(), epsilon=epsilon)
    with pytest.raises(ValueError, match="task"):
        population.with_private_labels(data(task="regression"), epsilon=1.0)
    with pytest.raises(ValueError, match="classes"):
        population.with_private_labels(data()._replace(num_outputs=2**21), epsilon=1.0)
