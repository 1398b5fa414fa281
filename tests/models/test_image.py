"""Published networks for images, beside flax.linen, NumPy, and the papers' numbers of parameters."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, models, population, run, sampling
from fedjax_sim.config import registry
from fedjax_sim.models import image, lenet5, resnet9, resnet18, resnet20, vgg11
from tests.refusals import refused

KEY = jax.random.key(0)
CIFAR = {"input_shape": (32, 32, 3), "num_outputs": 10}
NETWORKS = {"lenet5": lenet5, "resnet20": resnet20, "resnet18": resnet18, "resnet9": resnet9, "vgg11": vgg11}
SLOW_LAST = pytest.mark.default_rows(1)


def size(model):
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)[0]))


def output(model, params, x):
    return jax.jit(lambda params, x: model.apply(params, (), x, None, False)[0])(params, x)


def moved(params):
    """Parameters of which none is zero or one, so that a lost bias or scale is seen."""
    leaves, structure = jax.tree.flatten(params)
    noise = [0.1 * jax.random.normal(jax.random.fold_in(KEY, i), leaf.shape) for i, leaf in enumerate(leaves)]
    return structure.unflatten([leaf + more for leaf, more in zip(leaves, noise, strict=True)])


def test_parameter_counts():
    """Fault: a bias too many, a shortcut of another kind, a stage of another width, a norm that is shared or lost."""
    assert size(lenet5(input_shape=(28, 28), num_outputs=10)) == size(lenet5(input_shape=(32, 32, 1), num_outputs=10))
    assert size(lenet5(input_shape=(28, 28), num_outputs=10)) == 61_706
    for norm in ("group", "layer"):  # with batch norms the papers' networks have as many
        assert size(resnet20(**CIFAR, norm=norm)) == 269_722
        assert size(resnet18(**CIFAR, norm=norm)) == 11_173_962
        assert size(resnet9(**CIFAR, norm=norm)) == 6_573_130
        assert size(vgg11(**CIFAR, norm=norm)) == 9_231_114
    assert size(vgg11(**CIFAR)) == 9_225_610
    # Without a norm each channel has a bias in the place of a scale and a bias: 688 in the convolutions of ResNet-20.
    assert size(resnet20(**CIFAR, norm="none")) == 269_722 - (16 * 7 + 32 * 6 + 64 * 6)


def test_lenet_equals_numpy():
    """Fault: a border on one side, a largest value in the place of a mean, a ReLU, a permuted flattening."""
    model = lenet5(input_shape=(28, 27, 2), num_outputs=3)
    params = jax.tree.map(np.asarray, moved(model.init(KEY)[0]))
    x = np.asarray(jax.random.normal(KEY, (2, 28, 27, 2)))
    hidden = np.zeros((2, 32, 32, 2), np.float32)
    hidden[:, 2:30, 2:29] = x  # 5 columns are added to 27: 2 before and 3 behind
    for i in range(2):
        kernel, bias = params[f"conv_{i}"]["kernel"], params[f"conv_{i}"]["bias"]
        windows = np.lib.stride_tricks.sliding_window_view(hidden, (5, 5), axis=(1, 2))  # [n, h, w, in, 5, 5]
        hidden = np.tanh(np.einsum("nhwcij,ijco->nhwo", windows, kernel) + bias)
        hidden = (hidden[:, ::2, ::2] + hidden[:, 1::2, ::2] + hidden[:, ::2, 1::2] + hidden[:, 1::2, 1::2]) / 4
    hidden = hidden.reshape(2, 400)
    for name in ("hidden_0", "hidden_1"):
        hidden = np.tanh(hidden @ params[name]["kernel"] + params[name]["bias"])
    expected = hidden @ params["output"]["kernel"] + params["output"]["bias"]
    np.testing.assert_allclose(output(model, params, x), expected, rtol=2e-4, atol=2e-5)


class LinenResNet(nn.Module):
    """A stem and blocks, with the names of the parameters in the order in which they are made."""

    blocks: tuple
    groups: int | None
    projects: bool

    @nn.compact
    def __call__(self, x):
        def convolved(x, width, size=3, stride=1):
            x = nn.Conv(width, (size, size), stride, use_bias=self.groups is None)(x)
            return x if self.groups is None else nn.GroupNorm(self.groups)(x)

        x = nn.relu(convolved(x, self.blocks[0][0]))
        for width, stride in self.blocks:
            inner = convolved(nn.relu(convolved(x, width, 3, stride)), width)
            if x.shape[-1] != width or stride != 1:
                if self.projects:
                    x = convolved(x, width, 1, stride)
                else:
                    more = width - x.shape[-1]
                    x = jnp.pad(x[:, ::stride, ::stride], ((0, 0),) * 3 + ((more // 2, more - more // 2),))
            x = nn.relu(x + inner)
        return nn.Dense(3)(x.mean((1, 2)))


def as_linen(params, blocks):
    """Our parameters under the names that flax.linen gives to unnamed layers: by kind, in the order of the calls."""
    found = {"output": params["output"]}
    triples = [(params, "stem")]
    for i in range(len(blocks)):
        body, shortcut = params[f"block_{i}"]["body"], params[f"block_{i}"].get("shortcut", {})
        triples += [(body, "conv_0"), (body, "conv_1"), *([(shortcut, "projected")] if shortcut else [])]
    convolutions = {f"Conv_{i}": tree[name] for i, (tree, name) in enumerate(triples)}
    norms = {f"GroupNorm_{i}": tree[f"{name}_norm"] for i, (tree, name) in enumerate(triples) if f"{name}_norm" in tree}
    return convolutions | norms | {"Dense_0": found["output"]}


@SLOW_LAST
@pytest.mark.parametrize("norm, projects", [("group", True), ("layer", False), ("none", True)])
def test_residual_networks_equal_linen(norm, projects):
    """Fault: a ReLU before the sum, a lost norm of a shortcut, a stride at the second convolution, channels of zeros
    at one end, and a norm of other groups."""
    blocks = ((4, 1), (6, 2), (6, 1))
    shortcut = image._projected_shortcut if projects else image._padded_shortcut
    model = image._resnet((8, 7, 2), 3, norm, 2, blocks=blocks, shortcut=shortcut)
    params = moved(model.init(KEY)[0])
    x = jax.random.normal(KEY, (3, 8, 7, 2))
    oracle = LinenResNet(blocks, {"group": 2, "layer": 1, "none": None}[norm], projects)
    expected = jax.jit(oracle.apply)({"params": as_linen(params, blocks)}, x)
    np.testing.assert_allclose(output(model, params, x), expected, rtol=2e-5, atol=2e-5)


def test_the_networks_have_their_blocks():
    """Fault: a network whose count is right, but whose stride or shortcut is another's."""
    for model, sides in (
        (resnet20(**CIFAR), [32] * 3 + [16] * 3 + [8] * 3),
        (resnet18(**CIFAR), [32, 32, 16, 16, 8, 8, 4, 4]),
    ):
        params, _ = jax.eval_shape(model.init, KEY)
        x, found = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32), []
        for one in model.layers:
            alone = models.sequential([one])
            x = jax.eval_shape(lambda p, x, alone=alone: alone.apply(p, (), x, None, False)[0], params, x)
            found += [x.shape[1]] if one.branches else []
        assert found == sides and x.shape == (1, 10)
    assert (
        sum("projected" in inner.name for one in resnet18(**CIFAR).layers for _, b in one.branches for inner in b) == 6
    )


@SLOW_LAST
@pytest.mark.parametrize("name", NETWORKS)
def test_examples_do_not_mix(name):
    """Fault: statistics over the batch, by which padding would change a client's model."""
    model = NETWORKS[name](input_shape=(32, 32), num_outputs=3)
    params = model.init(KEY)[0]
    x = jax.random.normal(KEY, (2, 32, 32))
    got, other = output(model, params, x), output(model, params, x.at[1].set(jnp.nan))
    np.testing.assert_array_equal(got[0], other[0])
    # A ReLU that XLA:CPU fuses may turn NaN to 0. So the other row has to differ, and need not be NaN.
    assert np.isfinite(got).all() and not np.array_equal(other[1], got[1])


@SLOW_LAST
@pytest.mark.parametrize("name", NETWORKS)
def test_a_round_of_fedavg(name):
    """Fault: a network that no client can train, such as one that takes no images without an axis of channels."""
    data = population.digits(num_clients=4, held_out_clients=1)
    images = jax.tree.map(lambda a: a, data.train)
    shape = (8, 8)
    pad = 24 if name == "vgg11" else 0
    model = NETWORKS[name](input_shape=tuple(side + pad for side in shape), num_outputs=data.num_outputs)

    def as_images(params, state, x, key, is_training):
        x = jnp.pad(x.reshape(-1, *shape), ((0, 0), (0, pad), (0, pad)))
        return model.apply(params, state, x, key, is_training)

    loss_fn = models.supervised(model._replace(apply=as_images), models.default_loss(data.task))
    fedavg = algorithms.fedavg(loss_fn, sampling.full(4), optax.sgd(0.05), num_steps=2, batch_size=4)
    _, history = run(jax.random.key(0), fedavg, model.init(KEY)[0], images, 2)
    losses = [record["local_loss"] for record in history.records]
    assert np.isfinite(losses).all() and losses[0] != losses[1]


@SLOW_LAST
@pytest.mark.parametrize("name", NETWORKS)
def test_a_config_names_them(name):
    """Fault: a network that Python finds and a config does not."""
    part = registry.parts("models")[name]
    options = {"norm", "groups"} if name != "lenet5" else set()
    assert part.returns == "Model" and set(part.options) == options and not part.others


def test_wrong_arguments():
    """Fault: a network that is built for images that it cannot take."""
    with refused("input_shape"):
        lenet5(input_shape=(33, 28), num_outputs=10)
    with refused("input_shape"):
        resnet20(input_shape=(64,), num_outputs=10)
    with refused("input_shape"):
        vgg11(input_shape=(31, 32, 3), num_outputs=10)
    with refused("norm"):
        resnet20(**CIFAR, norm="batch")
    with refused("groups"):
        resnet20(**CIFAR, groups=5)
    with refused("x"):
        model = resnet20(**CIFAR)
        jax.eval_shape(lambda x: model.apply(model.init(KEY)[0], (), x, None, False), jnp.zeros((1, 32, 32)))
