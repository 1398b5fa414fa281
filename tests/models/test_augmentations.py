"""Augmentations change inputs in local steps alone, by the client, the round and the step, as their formulas say."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_sim import InvalidType, algorithms, engine, models, population, sampling
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.config.value_kinds import ConfigError
from fedjax_sim.models.augmentations import (
    Augmentation,
    augmented,
    color_jitter,
    cutout,
    horizontal_flip,
    jitter,
    random_crop,
)
from fedjax_sim.types import ClientData
from tests.refusals import refused

ALL = {
    "random_crop": random_crop(padding=2),
    "horizontal_flip": horizontal_flip(),
    "cutout": cutout(size=3),
    "color_jitter": color_jitter(brightness=0.3, contrast=0.3, saturation=0.3),
    "jitter": jitter(std=0.1),
}
KEY = jax.random.key(7)
IMAGES = jax.random.uniform(jax.random.key(1), (12, 5, 4, 3)) + 0.1  # no pixel is zero
ERROR = 1e-6  # probability that a right augmentation fails one of the statistical tests


def draws(augmentation, x, number=20_000):
    """The results of many draws for one example."""
    return np.asarray(jax.jit(lambda: augmented([augmentation], KEY, jnp.broadcast_to(x, (number, *x.shape))))())


def check_uniform(counts, cells):
    """Checks that all cells are as frequent."""
    assert len(counts) == cells and stats.chisquare(list(counts)).pvalue > ERROR


@pytest.mark.parametrize("name", ALL)
def test_draws_depend_on_the_place_alone(name):
    """Fault: draws that change with the size of a batch, with padding, or with an augmentation behind."""
    whole = augmented([ALL[name]], KEY, IMAGES)
    np.testing.assert_array_equal(whole[:5], augmented([ALL[name]], KEY, IMAGES[:5]))
    behind = augmented([ALL[name], Augmentation(lambda key, x: 2 * x)], KEY, IMAGES)
    np.testing.assert_array_equal(2 * whole, behind)
    assert not np.array_equal(whole, augmented([ALL[name]], jax.random.key(8), IMAGES))
    # Two examples with the same input have draws of their own.
    same = augmented([ALL[name]], KEY, jnp.broadcast_to(IMAGES[:1], IMAGES.shape))
    assert len({row.tobytes() for row in np.asarray(same)}) > 1


@pytest.mark.parametrize("name", [name for name in ALL if name != "color_jitter"])
def test_an_axis_of_one_channel_changes_nothing(name):
    """Fault: an image without channels that is read as rows of channels."""
    gray = IMAGES[..., :1]
    np.testing.assert_array_equal(augmented([ALL[name]], KEY, gray[..., 0]), augmented([ALL[name]], KEY, gray)[..., 0])


def test_windows_are_uniform():
    """Fault: pixels that wrap around or are none of the image's, and offsets that leave one side out."""
    image = np.arange(1.0, 13.0).reshape(3, 4, 1)
    padded = np.pad(image, ((1, 1), (1, 1), (0, 0)))
    windows = {padded[r : r + 3, c : c + 4].tobytes(): 0 for r in range(3) for c in range(3)}
    for row in draws(random_crop(padding=1), image).astype(np.float64):
        windows[row.tobytes()] += 1
    check_uniform(windows.values(), 9)


@pytest.mark.parametrize("probability", [0.0, 0.2, 0.5, 1.0])
def test_flips_are_as_frequent_as_asked(probability):
    """Fault: a flip of rows in place of columns, or a chance that is turned around."""
    image = np.arange(6.0).reshape(2, 3, 1)
    found = draws(horizontal_flip(probability=probability), image)
    flipped = (found == image[:, ::-1]).all((1, 2, 3))
    assert (flipped | (found == image).all((1, 2, 3))).all()
    assert stats.binomtest(int(flipped.sum()), len(found), probability).pvalue > ERROR


@pytest.mark.parametrize("size", [1, 2, 3])
def test_squares_are_cut_at_the_border(size):
    """Fault: a square that is moved inside, or reaches round to the other border."""
    height, width = 4, 3
    squares = {}
    for r in range(height):
        for c in range(width):
            image = np.ones((height, width, 2), np.float32)
            top, left = r - size // 2, c - size // 2
            image[max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = 0
            squares.setdefault(image.tobytes(), []).append((r, c))
    counts = dict.fromkeys(squares, 0)
    found = draws(cutout(size=size), np.ones((height, width, 2), np.float32))
    for row in found:
        counts[row.tobytes()] += 1
    expected = [len(middles) / (height * width) * len(found) for middles in squares.values()]
    assert stats.chisquare(list(counts.values()), expected).pvalue > ERROR


def test_colours_follow_their_formulas():
    """Fault: another gray, a mean over channels that weighs them alike, factors beyond their range, another order."""
    x = np.asarray(IMAGES[0], np.float64)
    gray = x @ np.array([0.299, 0.587, 0.114])  # ITU-R BT.601

    def factors(augmentation, base, change):
        """The factor of each draw, by least squares, which leaves nothing."""
        found = draws(augmentation, np.asarray(x, np.float32), 4000).astype(np.float64) - base
        fitted = (found * change).sum((1, 2, 3)) / np.square(change).sum()
        np.testing.assert_allclose(found, fitted[:, None, None, None] * change, atol=2e-6)
        return fitted

    flat = np.full_like(x, gray.mean())
    of_pixels = np.broadcast_to(gray[:, :, None], x.shape)
    for name, base in (("brightness", 0 * x), ("contrast", flat), ("saturation", of_pixels)):
        for strength, low in ((0.4, 0.6), (1.5, 0.0)):
            fitted = factors(color_jitter(**{name: strength}), base, x - base)
            uniform = stats.uniform(low, 1 + strength - low)
            assert stats.kstest(fitted, uniform.cdf).pvalue > ERROR
    # All three: the images span what the formulas make of brightness, then contrast, then saturation.
    key = jax.random.key(3)
    names = ("brightness", "contrast", "saturation")
    alone = {name: color_jitter(**{name: 0.4}).apply for name in names}
    in_order = IMAGES[0]
    for name in names:
        in_order = alone[name](key, in_order)
    together = color_jitter(**dict.fromkeys(names, 0.4)).apply(key, IMAGES[0])
    np.testing.assert_allclose(together, in_order, rtol=1e-6)


def test_noise_has_its_moments():
    """Fault: a variance in place of a standard deviation, or one draw for a whole example."""
    noise = draws(jitter(std=0.25), np.zeros((4, 3), np.float32), 5000)
    assert stats.kstest(noise.ravel(), stats.norm(0, 0.25).cdf).pvalue > ERROR
    # One behind another draws anew.
    twice = augmented(2 * [jitter(std=0.25)], KEY, jnp.zeros((5000, 12)))
    assert stats.kstest(np.ravel(twice), stats.norm(0, 0.25 * math.sqrt(2)).cdf).pvalue > ERROR
    correlations = np.corrcoef(noise.reshape(5000, 12).T)[np.triu_indices(12, 1)]
    assert np.abs(correlations).max() < stats.norm.isf(ERROR / 66 / 2) / math.sqrt(5000)


def image_loss(*augmentations):
    model = models.cnn(input_shape=(6, 6, 1), num_outputs=3, channels=(2,), hidden=(4,))
    return model, models.supervised(model, models.softmax_cross_entropy, augmentations=augmentations)


def test_evaluations_are_untouched():
    """Fault: a test accuracy of augmented images, or draws in a program that has no augmentation."""
    examples = {"x": jnp.ones((2, 6, 6, 1)), "y": jnp.zeros(2, jnp.int32)}
    model, plain = image_loss()
    _, changed = image_loss(random_crop(padding=1), horizontal_flip())
    params, _ = model.init(KEY)
    program = {
        key is None: [
            str(jax.make_jaxpr(lambda p, e, f=f, k=key: f(p, e, k))(params, examples)) for f in (plain, changed)
        ]
        for key in (None, KEY)
    }
    assert program[True][0] == program[True][1] and program[False][0] != program[False][1]


def client(sizes, id):
    """One of five clients with 1 to 5 images of its own."""
    x = jax.random.normal(jax.random.fold_in(KEY, id), (5, 6, 6, 1))
    return ClientData({"x": x, "y": jnp.arange(5) % 3}, jnp.arange(5) < sizes[id])


def a_round(lanes, *augmentations):
    """The model after a round of two local steps of ragged clients."""
    model, loss_fn = image_loss(*augmentations)
    fedavg = algorithms.fedavg(
        loss_fn, sampling.full(5), optax.sgd(0.1), num_steps=2, batch_size=2, plan=engine.Plan(lanes=lanes, chunk=lanes)
    )
    people = population.generated(5, client, jnp.array([3, 5, 1, 4, 2]))
    state = fedavg.init(KEY, model.init(KEY)[0], people)
    return jax.jit(fedavg.step)(jax.random.key(1), state, people)[0]


@pytest.mark.optimised(False)
def test_a_round_does_not_depend_on_lanes():
    """Fault: draws by the slot or the lane of a client, so that results depend on the device."""
    augmentations = random_crop(padding=1), jitter(std=0.1)
    one, five = (a_round(lanes, *augmentations) for lanes in (1, 5))
    jax.tree.map(np.testing.assert_array_equal, one, five)
    plain = a_round(5)
    assert any(not np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (five, plain)), strict=True))


@pytest.mark.parametrize(
    ("augmentation", "shape", "dtype", "argument"),
    [
        (random_crop(padding=1), (4,), np.float32, "random_crop"),
        (horizontal_flip(), (4,), np.float32, "horizontal_flip"),
        (cutout(size=1), (2, 2, 2, 1), np.float32, "cutout"),
        (color_jitter(brightness=0.1), (2, 2, 1), np.int32, "color_jitter"),
        (color_jitter(saturation=0.1), (2, 2, 1), np.float32, "color_jitter"),
        (color_jitter(brightness=0.1), (2, 2, 4), np.float32, "color_jitter"),
        (jitter(std=0.1), (2,), np.int32, "jitter"),
        (Augmentation(lambda key, x: x[:1]), (2,), np.float32, "augmentations[0]"),
        (Augmentation(lambda key, x: x.astype(jnp.float16)), (2,), np.float32, "augmentations[0]"),
    ],
)
def test_examples_that_do_not_fit(augmentation, shape, dtype, argument):
    """Fault: an axis of channels that is flipped, or a shape that the model meets as another one."""
    with refused(argument):
        augmented([augmentation], KEY, jnp.zeros((3, *shape), dtype))


def test_wrong_options():
    with refused("augmentations[0]", kind=InvalidType):
        image_loss(lambda key, x: x)
    with refused("brightness, contrast, saturation"):
        color_jitter()
    for make, argument, value in ((random_crop, "padding", 0), (horizontal_flip, "probability", 1.1),
                                  (cutout, "size", 0), (jitter, "std", math.nan)):  # fmt: skip
        with refused(argument):
            make(**{argument: value})


SETTINGS = ["data.name=synthetic_images", "data.side=8", "data.num_clients=5", "run.rounds=1"]
CROP = "augmentation.random_crop.padding=1"


def test_a_config_has_augmentations():
    """Fault: a table that is read and not used, or used in another order than the file's."""
    loss_fn = build(load(None, [*SETTINGS, CROP, "augmentation.jitter.std=0.1"])).loss_fn
    plain = build(load(None, SETTINGS)).loss_fn
    params, _ = models.mlp(input_shape=(8, 8), num_outputs=10).init(KEY)
    examples = {
        "x": jnp.asarray(np.random.default_rng(0).uniform(size=(3, 8, 8)), jnp.float32),
        "y": jnp.zeros(3, int),
    }
    changed = {**examples, "x": augmented([random_crop(padding=1), jitter(std=0.1)], KEY, examples["x"])}
    np.testing.assert_array_equal(loss_fn(params, examples, KEY)["loss"], plain(params, changed, KEY)["loss"])
    np.testing.assert_array_equal(loss_fn(params, examples, None)["loss"], plain(params, examples, None)["loss"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([*SETTINGS, "augmentation.random_crop.padding=0"], "augmentation.random_crop.padding: expected"),
        ([*SETTINGS, "augmentation.crop.padding=1"], "augmentation.crop: expected one of"),
        ([*SETTINGS, "augmentation.color_jitter.saturation=0.1"], "augmentation: expected what fits the inputs"),
        ([*SETTINGS, CROP, "algorithm.name=fedproto"], "augmentation: expected no such table with fedproto"),
        (["data.name=quadratics", "model.name=point", CROP], "augmentation: expected no such table for the task"),
    ],
)
def test_a_config_that_does_not_fit(settings, words):
    """Fault: augmentations that are dropped in silence where nothing takes them."""
    with pytest.raises(ConfigError) as error:
        build(load(None, settings))
    assert words in str(error.value)
