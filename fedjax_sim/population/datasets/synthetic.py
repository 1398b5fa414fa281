"""This module draws synthetic data sets from stated distributions, most of which have a known optimum.

All but `synthetic` compute a client from its id, so that any number of clients takes no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData, from_sites
from fedjax_sim.population.population import generated
from fedjax_sim.population.seeds import generated_client_key, seed_words
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, ClientData, Population
from fedjax_sim.validate import Finite, Integer, NonNegative, NonNegativeInt, Number, PositiveInt


@validate.named_arguments
def synthetic(
    *,
    alpha: NonNegative = 1.0,
    beta: NonNegative = 1.0,
    num_clients: PositiveInt = 30,
    test_fraction: Annotated[float, Number(0, 0.9, open_low=True)] = 0.1,
    max_examples: Annotated[int, Integer(2)] | None = None,
    iid: bool = False,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """Draws Synthetic(alpha, beta), where each client has a softmax model and an input distribution of its own.

    There are 60 features and 10 classes. Client i has

    - n_i = 50 + floor(Lognormal(4, 2)) examples,
    - a model W_i, b_i ~ N(u_i, 1) entry by entry, with u_i ~ N(0, alpha),
    - inputs x ~ N(v_i, diag(j^-1.2)), with v_i ~ N(B_i, 1) entry by entry and B_i ~ N(0, beta),
    - labels y = argmax softmax(x W_i + b_i).

    As in the authors' generator, alpha and beta are standard deviations, and u_i is the mean of both W_i and b_i. The
    distribution is that of the authors, and the random bits depend on `seed`.

    Args:
      alpha: >= 0, how much local models differ.
      beta: >= 0, how much local inputs differ.
      num_clients: N.
      test_fraction: the last ceil(test_fraction * n_i) examples of each client are its test part (authors: 0.1).
      max_examples: the most examples of a client, which bounds padding under the heavy tail. None sets no bound, as the
        authors do.
      iid: all clients have one model W, b ~ N(0, 1), and v_i = 0. Then alpha and beta have no effect.
      seed: of all draws.

    Returns: `FederatedData`. Held-out client i is the test part of training client i.

    Guarantees: sizes, inputs and labels follow the stated distribution
    (tests/population/datasets/test_synthetic.py::test_synthetic_follows_the_published_recipe).

    References: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Federated optimization in heterogeneous networks, 2020,
    section 5.1.

    >>> data = synthetic(alpha=1.0, beta=1.0, num_clients=3, max_examples=100)
    >>> data.train.size, data.input_shape, data.num_outputs
    (3, (60,), 10)
    """
    dimension = 60
    num_classes = 10
    rng = np.random.default_rng(seed)
    # The cap keeps the cast to integers, and 50 more, within int32.
    counts = np.minimum(rng.lognormal(4.0, 2.0, num_clients), 2**31 - 51).astype(np.int64) + 50
    counts = counts if max_examples is None else np.minimum(counts, max_examples)
    validate.fits_in_memory("num_clients", int(counts.sum()) * dimension * 8, 2**36, hint="Set max_examples.")
    input_deviation = np.arange(1, dimension + 1) ** -0.6
    model_means = rng.normal(0.0, alpha, num_clients)
    input_means = rng.normal(0.0, beta, num_clients)
    shared_weights = rng.normal(size=(dimension, num_classes))
    shared_bias = rng.normal(size=num_classes)
    train = {}
    test = {}
    for i, n in enumerate(counts):
        center = np.zeros(dimension) if iid else rng.normal(input_means[i], 1.0, dimension)
        weights = shared_weights
        bias = shared_bias
        if not iid:
            weights = rng.normal(model_means[i], 1.0, (dimension, num_classes))
            bias = rng.normal(model_means[i], 1.0, num_classes)
        x = center + input_deviation * rng.normal(size=(n, dimension))
        y = np.argmax(x @ weights + bias, axis=1)  # argmax of the softmax is argmax of the logits
        # The fraction as it is written, for in floats 0.07 * 100 is 7.000000000000001, whose ceiling is 8.
        cut = n - math.ceil(validate.as_written(test_fraction) * int(n))
        train[f"f_{i:05d}"] = {"x": x[:cut], "y": y[:cut]}
        test[f"f_{i:05d}"] = {"x": x[cut:], "y": y[cut:]}
    data = from_sites(train, test, task="classification", num_outputs=num_classes, name="synthetic", learned=())
    return data._replace(client_names=None, held_out_names=None)  # generated clients are known by their numbers


def _paired(parameters: Any, id: Array, draw: Any) -> Array:
    """Returns a client's deviation. The deviations of all clients sum to exactly zero.

    Clients 2k and 2k + 1 have the deviations z and -z. An unpaired last client has 0. `draw` maps a key to z.
    """
    deviation = draw(stream(generated_client_key(parameters, id // 2), "deviation"))
    is_unpaired = (id == parameters["size"] - 1) & (parameters["size"] % 2 == 1)
    return jnp.where(is_unpaired, 0.0, jnp.where(id % 2 == 0, 1.0, -1.0)) * deviation


def _teacher_of(parameters: Any, id: Array) -> Array:
    """Returns the linear model w + s_i of client `id`, [d]."""
    teacher = parameters["teacher"]
    deviation = _paired(parameters, id, lambda key: jax.random.normal(key, teacher.shape))
    return teacher + parameters["heterogeneity"] * deviation


def _linear_client(parameters: Any, id: Array) -> ClientData:
    """Generates a client of `linear_teacher`: x ~ N(0, I) and y = x . (w + s_i) + noise e, with e ~ N(0, 1).

    Args:
      parameters: see `_teacher`.
      id: i, [] int32.

    Returns: `ClientData` with x [n, d] and y [n, 1].
    """
    key = generated_client_key(parameters, id)
    n = parameters["mask"].shape[0]
    x = jax.random.normal(stream(key, "features"), (n, parameters["teacher"].shape[0]))
    y = x @ _teacher_of(parameters, id) + parameters["noise"] * jax.random.normal(stream(key, "labels"), (n,))
    return ClientData({"x": x, "y": y[:, None]}, jnp.asarray(parameters["mask"]))


def _logistic_client(parameters: Any, id: Array) -> ClientData:
    """Generates a client of `logistic_teacher`: P(y = 1) = noise + (1 - 2 noise) sigmoid(x . (w + s_i)), x ~ N(0, I).

    Args:
      parameters: see `_teacher`.
      id: i, [] int32.

    Returns: `ClientData` with x [n, d] and y [n] int32.
    """
    key = generated_client_key(parameters, id)
    n = parameters["mask"].shape[0]
    x = jax.random.normal(stream(key, "features"), (n, parameters["teacher"].shape[0]))
    noise = parameters["noise"]
    probability = noise + (1 - 2 * noise) * jax.nn.sigmoid(x @ _teacher_of(parameters, id))
    y = jax.random.uniform(stream(key, "labels"), (n,)) < probability
    return ClientData({"x": x, "y": y.astype(jnp.int32)}, jnp.asarray(parameters["mask"]))


def _mean_client(parameters: Any, id: Array) -> ClientData:
    """Generates a client of `mean_estimation`: its value is mean + spread z_i, where all z_i sum to zero.

    Args:
      parameters: "mean" [d], "spread" [], "two_point" [] bool (whether coordinates of z are -1 or 1, else they are
        normal), "seed", and "size" [], the number of clients.
      id: i, [] int32.

    Returns: `ClientData` with x [1, 1], which is 1, and y [1, d], the value.
    """
    mean = parameters["mean"]

    # Both kinds of values are drawn and one is selected, so that data sets of both kinds share a compiled program.
    def draw(key):
        signs = jax.random.rademacher(key, mean.shape, jnp.float32)
        return jnp.where(parameters["two_point"], signs, jax.random.normal(key, mean.shape))

    value = mean + parameters["spread"] * _paired(parameters, id, draw)
    return ClientData({"x": jnp.ones((1, 1)), "y": value[None]}, jnp.ones(1, bool))


class _Teacher(NamedTuple):
    """What `linear_teacher` and `logistic_teacher` have in common."""

    train: Population
    held_out: Population | None
    teacher: np.ndarray  # w, [d] float32
    x: np.ndarray  # [test_examples, d] float32, features of the test rows
    rng: np.random.Generator  # draws their labels


def _teacher(
    client: Callable,
    *,
    num_clients: int,
    dimension: int,
    examples_per_client: int,
    noise: float,
    heterogeneity: float,
    held_out_clients: int,
    test_examples: int,
    seed: int,
) -> _Teacher:
    """Draws the teacher w ~ N(0, I / d) and test features x ~ N(0, I), and builds the populations.

    Client i has the model w + (heterogeneity / sqrt(d)) z_i with z_i ~ N(0, I), see `_teacher_of`.

    Args:
      client: (parameters, id) -> `ClientData`, traced: `_linear_client` or `_logistic_client`. Its parameters are
        "teacher" [d] w, "noise" [], "heterogeneity" [] divided by sqrt(d), "mask" [n] bool, "seed", and "size" [], the
        number of clients.
      num_clients: N >= 1.
      dimension: d >= 1.
      examples_per_client: n >= 1.
      noise: of the labels, in the unit of the client: a standard deviation, or the probability of a flip.
      heterogeneity: >= 0, the root of the mean of |s_i|^2.
      held_out_clients: >= 0.
      test_examples: >= 1.
      seed: >= 0, of all draws.
    """
    validate.integer("num_clients", num_clients)
    validate.integer("dimension", dimension)
    validate.integer("examples_per_client", examples_per_client)
    validate.integer("held_out_clients", held_out_clients, 0)
    validate.integer("test_examples", test_examples)
    validate.in_range("heterogeneity", heterogeneity, 0)
    validate.integer("seed", seed, 0)
    rng = np.random.default_rng([seed, 0])
    # Dividing by sqrt(d) makes the squared norms of the teacher and of the shifts independent of d, on average.
    parameters = {
        "teacher": (rng.normal(size=dimension) / np.sqrt(dimension)).astype(np.float32),
        "noise": np.float32(noise),
        "heterogeneity": np.float32(heterogeneity / np.sqrt(dimension)),
        "mask": np.ones(examples_per_client, bool),
    }

    def people(size: int, purpose: int) -> Population:
        own_parameters = {**parameters, "seed": seed_words(seed, purpose), "size": np.int32(size)}
        return generated(size, client, own_parameters, learned=())

    # The purpose is a part of the seed, so that clients in and outside of the population draw independently.
    train = people(num_clients, 1)
    held_out = people(held_out_clients, 2) if held_out_clients else None
    # The test labels differ between the two data sets, and are drawn from `rng` by the caller.
    x = rng.normal(size=(test_examples, dimension)).astype(np.float32)
    return _Teacher(train, held_out, parameters["teacher"], x, rng)


@validate.named_arguments
def linear_teacher(
    *,
    num_clients: int = 1_000_000,
    dimension: int = 20,
    examples_per_client: int = 20,
    noise: NonNegative = 0.1,
    heterogeneity: float = 0.0,
    held_out_clients: int = 100,
    test_examples: int = 1_000,
    seed: int = 0,
) -> FederatedData:
    """Draws linear regression problems with a known optimum: y = x . (w + s_i) + noise, x ~ N(0, I).

    The model w, the teacher, is common to all clients, and s_i is the shift of client i. A client is a pure function of
    its id, so 10^9 clients take no memory.

    Args:
      num_clients: N, up to 2^31 - 1.
      dimension: d.
      examples_per_client: n.
      noise: standard deviation >= 0 of a label around its mean x . (w + s_i).
      heterogeneity: >= 0. |s_i|^2 is heterogeneity^2 on average, while |w|^2 is 1 on average.
      held_out_clients: clients of the same distribution outside the population. 0 for none.
      test_examples: rows drawn from the common teacher w.
      seed: of all draws.

    Returns: `FederatedData`. `train.parameters["teacher"]` is w [d].

    Guarantees: the shifts s_i sum to zero over the population, so w minimises the expected global risk
    (tests/population/datasets/test_synthetic.py::test_teacher_is_the_answer).

    >>> data = linear_teacher(num_clients=1_000_000_000, dimension=3, examples_per_client=2)
    >>> jax.jit(data.train.client)(np.int32(999_999_999)).examples["x"].shape
    (2, 3)
    """
    made = _teacher(
        _linear_client,
        num_clients=num_clients,
        dimension=dimension,
        examples_per_client=examples_per_client,
        noise=noise,
        heterogeneity=heterogeneity,
        held_out_clients=held_out_clients,
        test_examples=test_examples,
        seed=seed,
    )
    y = (made.x @ made.teacher + noise * made.rng.normal(size=test_examples)).astype(np.float32)
    return FederatedData(
        train=made.train,
        test={"x": made.x, "y": y[:, None]},
        held_out=made.held_out,
        input_shape=(dimension,),
        num_outputs=1,
        task="regression",
        name="linear_teacher",
    )


@validate.named_arguments
def logistic_teacher(
    *,
    num_clients: int = 1_000_000,
    dimension: int = 20,
    examples_per_client: int = 20,
    noise: Annotated[float, Number(0, 0.5, open_high=True)] = 0.0,
    heterogeneity: float = 0.0,
    held_out_clients: int = 100,
    test_examples: int = 1_000,
    seed: int = 0,
) -> FederatedData:
    """Draws binary labels from a logistic model: P(y = 1) = noise + (1 - 2 noise) sigmoid(x . (w + s_i)), x ~ N(0, I).

    Args:
      noise: probability in [0, 0.5) of a flipped label.
      num_clients, dimension, examples_per_client, heterogeneity, held_out_clients, test_examples, seed: as in
        `linear_teacher`.

    Returns: `FederatedData`. `train.parameters["teacher"]` is w [d]. It minimises the expected risk if noise and
      heterogeneity are 0. Otherwise the best common model points along w, but is shorter.

    Guarantees: without heterogeneity, 50,000 labels with noise 0.1 pass a test of this probability within 6 standard
    deviations, which rejects noise of 0.05 and 0.15
    (tests/population/datasets/test_synthetic.py::test_logistic_labels_follow_the_law).

    >>> data = logistic_teacher(num_clients=10, dimension=3, examples_per_client=2)
    >>> data.task, data.num_outputs, jax.jit(data.train.client)(np.int32(0)).examples["y"].shape
    ('binary', 1, (2,))
    """
    made = _teacher(
        _logistic_client,
        num_clients=num_clients,
        dimension=dimension,
        examples_per_client=examples_per_client,
        noise=noise,
        heterogeneity=heterogeneity,
        held_out_clients=held_out_clients,
        test_examples=test_examples,
        seed=seed,
    )
    probability = noise + (1 - 2 * noise) / (1 + np.exp(-(made.x @ made.teacher)))
    y = (made.rng.uniform(size=test_examples) < probability).astype(np.int32)
    return FederatedData(
        train=made.train,
        test={"x": made.x, "y": y},
        held_out=made.held_out,
        input_shape=(dimension,),
        num_outputs=1,
        task="binary",
        name="logistic_teacher",
    )


@validate.named_arguments
def mean_estimation(
    *,
    num_clients: PositiveInt = 1_000_000,
    dimension: PositiveInt = 1,
    mean: Finite = 0.0,
    spread: NonNegative = 1.0,
    values: Literal["gaussian", "two_point"] = "gaussian",
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """Each client holds one value, and the task is to estimate the mean of all values.

    This is the smallest cross-device task with a known optimum: a regression on the constant input 1. Clients 2k and
    2k + 1 hold mean + z_k and mean - z_k, and an unpaired last client holds the mean. So the mean of this finite
    population is exactly `mean`, not only in expectation.

    Args:
      num_clients: N, up to 2^31 - 1.
      dimension: d, the number of coordinates of a value.
      mean: the value of every coordinate of the optimum.
      spread: standard deviation >= 0 of a coordinate over the clients.
      values: "gaussian" or "two_point". With "two_point" every coordinate is mean + spread or mean - spread. Then
        values are bounded, and for even N the population variance is exactly spread^2.
      seed: of all draws.

    Returns: `FederatedData`. Each client has one example, x = [1] and y = its value [d]. The target of the only test
      row is the mean.

    Guarantees: the mean over all clients is `mean` up to rounding, and with "two_point" values and even N their
    variance is the square of `spread` up to rounding
    (tests/population/datasets/test_synthetic.py::test_mean_estimation_is_exact).

    >>> data = mean_estimation(num_clients=2, mean=3.0)
    >>> values = [jax.jit(data.train.client)(np.int32(i)).examples["y"][0, 0] for i in range(2)]
    >>> float(values[0] + values[1]) / 2
    3.0
    """
    optimum = np.full(dimension, mean, np.float32)
    parameters = {
        "mean": optimum,
        "spread": np.float32(spread),
        "two_point": np.bool_(values == "two_point"),
        "seed": seed_words(seed, 1),
        "size": np.int32(num_clients),
    }
    test = {"x": np.ones((1, 1), np.float32), "y": optimum[None]}
    train = generated(num_clients, _mean_client, parameters, learned=())
    return FederatedData(
        train=train,
        test=test,
        held_out=None,
        input_shape=(1,),
        num_outputs=dimension,
        task="regression",
        name="mean_estimation",
    )
