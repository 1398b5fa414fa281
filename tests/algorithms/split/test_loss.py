"""A model cut between parties: the same steps, what each party sees, and the bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, client, engine, network, tree
from fedjax_sim.algorithms import Split, split_client, split_loss
from fedjax_sim.algorithms.split.loss import split_transcript
from fedjax_sim.algorithms.split.traffic import bits_by_direction, crossings
from fedjax_sim.models import (
    blocks,
    distance_correlation,
    mlp,
    sequential,
    softmax_cross_entropy,
    squared_error,
    supervised,
)
from fedjax_sim.types import ClientData
from tests.laws.cases import rows
from tests.refusals import refused

KEY = jax.random.key(0)
TOY = mlp(input_shape=(10,), num_outputs=1, hidden=(20, 15))  # the worked configuration
DEEP = mlp(input_shape=(10,), num_outputs=3, hidden=(9, 8, 7, 6))
FORK = sequential(
    [
        blocks.fully_connected("first", 10, 8),
        blocks.two_branch("fork", [blocks.fully_connected("a", 8, 4)], [blocks.fully_connected("b", 8, 3)]),
        blocks.fully_connected("output", 7, 3, activation="none"),
    ]
)
X = jax.random.normal(jax.random.key(1), (40, 10))
Y = jax.random.randint(jax.random.key(2), (40,), 0, 3)


def data(n=37, y=Y):
    return ClientData({"x": X, "y": y}, jnp.arange(40) < n)


CUTS = {
    "one": (DEEP, "hidden_1", False),
    "two": (DEEP, ("hidden_0", "hidden_2"), False),
    "three": (DEEP, ("hidden_0", "hidden_1", "hidden_3"), False),
    "four": (DEEP, ("hidden_0", "hidden_1", "hidden_2", "hidden_3"), False),
    "u": (DEEP, ("hidden_0", "hidden_3"), True),
    "branch": (FORK, {"first": 0, "fork": 2, "fork/left": 0, "fork/right": 1, "output": 2}, False),
}


def trained(loss_fn, model, optimizer, **work):
    work = {"num_steps": 50, "batch_size": 8} | work
    params = model.init(KEY)[0]
    made = split_client if isinstance(loss_fn, Split) else client.local_sgd
    made = made(loss_fn, optimizer, client.work(**work))
    report = jax.jit(lambda: made.apply(KEY, params, (), data())[0])()
    return jax.tree.map(jnp.add, params, report.update)


@pytest.mark.default_rows("u")
@pytest.mark.parametrize("name", rows(CUTS, ("one", "four", "u")))
def test_split_equals_monolithic(name):
    """50 steps of Adam. Catches a gradient that is lost, doubled or taken elsewhere on its way over the cuts."""
    model, at, u_shaped = CUTS[name]
    split = split_loss(model, softmax_cross_entropy, at, u_shaped=u_shaped, link=network.link(encrypted=True))
    expected, got = (trained(f, model, optax.adam(0.01)) for f in (supervised(model, softmax_cross_entropy), split))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def parties_by_hand(params, x, y, lr, steps):
    """Two machines, each with its own parameters and its own Adam; only arrays pass between them."""
    own = {"hidden_0": params["hidden_0"]}
    rest = {name: params[name] for name in ("hidden_1", "output")}
    adam = optax.adam(lr)
    states = [adam.init(own), adam.init(rest)]

    def bottom(p):
        return jax.nn.relu(x @ p["hidden_0"]["kernel"] + p["hidden_0"]["bias"][None])

    def top(p, h):
        h = jax.nn.relu(h @ p["hidden_1"]["kernel"] + p["hidden_1"]["bias"][None])
        return jnp.mean((h @ p["output"]["kernel"] + p["output"]["bias"][None] - y[:, None]) ** 2)

    for _ in range(steps):
        smashed, pull = jax.vjp(bottom, own)
        grad_rest, grad_smashed = jax.grad(top, (0, 1))(rest, smashed)
        (grad_own,) = pull(grad_smashed)
        updates, states[0] = adam.update(grad_own, states[0])
        own = optax.apply_updates(own, updates)
        updates, states[1] = adam.update(grad_rest, states[1])
        rest = optax.apply_updates(rest, updates)
    return own | rest


@pytest.mark.full
def test_split_equals_two_machines():
    """The four steps written out with two optimisers. Catches a traced program that no two machines could compute."""
    y = jax.random.normal(jax.random.key(5), (40,))
    split, params = split_loss(TOY, squared_error, "hidden_0"), TOY.init(KEY)[0]
    made = split_client(split, optax.adam(0.01), client.work(num_steps=50))
    report = made.apply(KEY, params, (), data(40, y))[0]
    expected = jax.jit(lambda: parties_by_hand(params, X, y, 0.01, 50))()
    for name in params:
        for part in params[name]:
            got = params[name][part] + report.update[name][part]
            np.testing.assert_allclose(got, expected[name][part], atol=1e-6)


def told(split, params, examples):
    """The transcript, whose values one program computes."""
    messages = []

    @jax.jit
    def values(params, examples):
        messages[:] = split_transcript(split, params, examples, KEY).messages
        return [message.value for message in messages]

    found = values(params, examples)
    return network.Transcript(tuple(m._replace(value=x) for m, x in zip(messages, found, strict=True)))


def test_what_each_party_sees():
    """The tensors that each party receives, by name. Catches labels or examples that are sent, to anybody."""
    examples = {"x": X, "y": Y}
    params = DEEP.init(KEY)[0]
    plain = told(split_loss(DEEP, softmax_cross_entropy, ("hidden_0", "hidden_1")), params, examples)
    seen = [[(m.name, m.kind) for m in plain.seen_by(party)] for party in range(3)]
    assert seen == [
        [("hidden_1", "gradients")],
        [("hidden_1", "activations"), ("hidden_2", "gradients")],
        [("labels", "labels"), ("hidden_2", "activations")],
    ]
    u_shaped = split_loss(DEEP, softmax_cross_entropy, ("hidden_0", "hidden_3"), u_shaped=True)
    hidden = told(u_shaped, params, examples)
    assert [(m.name, m.kind) for m in hidden.seen_by(1)] == [("hidden_1", "activations"), ("output", "gradients")]
    other = told(u_shaped, params, {"x": X, "y": (Y + 1) % 3})
    assert (hidden.seen_by(1)[0].value == other.seen_by(1)[0].value).all()  # labels are not in what goes up
    assert (hidden.seen_by(1)[1].value != other.seen_by(1)[1].value).any()  # they are in the gradient: see J10
    for made in (plain, hidden):
        for message in made.messages:
            assert message.value.shape != X.shape and (message.kind == "labels") == (message.value.ndim == 1)
    gradient = jax.jit(jax.grad(lambda h: _tail(params, h).mean()))(plain.seen_by(2)[1].value)
    np.testing.assert_allclose(plain.seen_by(1)[1].value, gradient, atol=1e-6)


def _tail(params, h):
    for name in ("hidden_2", "hidden_3"):
        h = jax.nn.relu(h @ params[name]["kernel"] + params[name]["bias"][None])
    return softmax_cross_entropy(h @ params["output"]["kernel"] + params["output"]["bias"][None], Y)["loss"]


@pytest.mark.full
def test_labels_are_encrypted_as_the_rest_is():
    """Catches labels that somebody on the line reads although the link is encrypted, and a second nonce where they go
    with the activations, or none where they go alone."""
    examples, made = {"x": X, "y": Y}, network.link(encrypted=True)
    for at, beside in (("hidden_0", 0), (("hidden_0", "hidden_1"), 224)):
        split = split_loss(DEEP, softmax_cross_entropy, at, link=made)
        seen = told(split, DEEP.init(KEY)[0], examples)
        assert all(m.encrypted for m in seen.messages) and seen.messages[0].kind == "labels"
        assert (seen.overheard(KEY)[0].value != Y.astype(jnp.uint32)).mean() > 0.9
        (labels, *_) = crossings(split, DEEP.init(KEY)[0], {"x": X[0], "y": Y[0]})
        assert (labels.there, labels.back, labels.batch) == (32, 0, beside)
    alone = split_loss(DEEP, softmax_cross_entropy, "hidden_0", link={"labels": made})
    plain = told(alone, DEEP.init(KEY)[0], examples).messages
    assert [m.encrypted for m in plain] == [True, False, False] and (plain[0].value == Y).all()


@pytest.mark.full
def test_the_worked_configuration():
    """10 -> 20 -> 15 -> 1, batches of 32: 1,312 floats a batch against 1,102 a round of FedAvg; 6,400 products a step.

    Catches labels, a way or a batch that is not counted, and the claim that split learning always sends less.
    """
    split, params = split_loss(TOY, squared_error, "hidden_0"), TOY.init(KEY)[0]
    sizes = [tree.num_values(part) for part in split.cut.split(params)]
    assert sizes == [220, 331]
    example = {"x": jnp.zeros(10), "y": jnp.zeros(())}
    bits = bits_by_direction(crossings(split, params, example))
    assert bits == {"up": (21 * 32, 0), "down": (20 * 32, 0), "other": (0, 0)}
    assert (
        32 * (21 + 20) == 1312 and 50 * 1312 == 65_600 and 65_600 / (2 * sum(sizes)) == pytest.approx(59.53, abs=0.01)
    )
    made = split_client(split, optax.adam(0.01), client.work(num_epochs=1, batch_size=32))
    people = ClientData({"x": jnp.zeros((1600, 10)), "y": jnp.zeros(1600)}, jnp.ones(1600, bool))
    counts = jax.jit(lambda: made.apply(KEY, params, (), people)[0].counts)()
    assert {name: x.tolist() for name, x in counts.items()} == {
        "split_up_bytes": [0, 4 * 50 * 32 * 21],
        "split_down_bytes": [0, 4 * 50 * 32 * 20],
    }
    assert sum(int(x[1]) for x in counts.values()) == 4 * 65_600
    first = split.cut.split(params)[0]
    program = jax.make_jaxpr(lambda p, x: x @ p["hidden_0"]["kernel"])(first, jnp.zeros((32, 10)))
    assert engine.flops(program) == 2 * 6400


@pytest.mark.full
def test_the_toy_ends_at_the_floor():
    """Targets are noise, so the loss ends near their variance of 1. Catches accuracy measured where there is none."""
    key = jax.random.key(7)
    x, y = jax.random.normal(key, (1600, 10)), jax.random.normal(jax.random.key(8), (1600,))
    split = split_loss(TOY, squared_error, "hidden_0")
    made, params = split_client(split, optax.adam(0.01), client.work(num_epochs=1, batch_size=32)), TOY.init(KEY)[0]
    report = jax.jit(lambda: made.apply(KEY, params, (), ClientData({"x": x, "y": y}, jnp.ones(1600, bool)))[0])()
    last = split(jax.tree.map(jnp.add, params, report.update), {"x": x, "y": y})["loss"].mean()
    assert 0.7 < float(last) < 1.3


@pytest.mark.full
def test_no_peek():
    """Less of the examples in what is sent, and padding left out. Catches a penalty without a slope or of the server's
    layers, one in evaluations, and rows that do not exist."""
    params = TOY.init(KEY)[0]
    x, y = X[:20], X[:20, 0] ** 2
    found, told = [], []
    for weight in (0.0, 20.0):
        split = split_loss(TOY, squared_error, "hidden_0", decorrelation=weight)
        updates = []
        for steps, n in ((10, 0), (10, 12), (150, 0)):
            made = split_client(split, optax.adam(0.01), client.work(num_steps=steps))
            rows = {"x": jnp.concatenate([x, 9 + X[:n]]), "y": jnp.concatenate([y, Y[:n] * 1.0])}
            one = ClientData(rows, jnp.arange(20 + n) < 20)
            report = jax.jit(lambda one, made=made: made.apply(KEY, params, (), one)[0])(one)
            updates.append(report.update)
        for a, b in zip(*map(jax.tree.leaves, updates[:2]), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
        after = jax.tree.map(jnp.add, params, updates[2])
        smashed = split_transcript(split, after, {"x": x, "y": y}).seen_by(1)[1].value
        found.append(float(distance_correlation(x, smashed)))
        told.append(sorted(report.metrics))
        assert sorted(split(after, {"x": x, "y": y})) == ["loss"]
    assert found[1] < 0.8 * found[0]
    assert told == [["local_loss", "local_steps"], ["local_distance_correlation", "local_loss", "local_steps"]]


def test_splits_that_cannot_be():
    """Catches a link of a layer that receives nothing, of labels that nobody sends, and padding in a correlation."""
    with pytest.raises(ValueError, match="hidden_1"):
        split_loss(DEEP, softmax_cross_entropy, "hidden_0", link={"hiden_1": network.Link()})
    with pytest.raises(TypeError, match="link"):
        split_loss(DEEP, softmax_cross_entropy, "hidden_0", link=8)
    with pytest.raises(ValueError, match="decorrelation"):
        split_loss(DEEP, softmax_cross_entropy, "hidden_0", decorrelation=-1.0)
    with pytest.raises(ValueError, match="labels"):
        split_loss(
            DEEP, softmax_cross_entropy, ("hidden_0", "hidden_1"), u_shaped=True, link={"labels": network.Link()}
        )
    with refused("measure", rule="(outputs, examples)", kind=InvalidType):
        split_loss(DEEP, softmax_cross_entropy, "hidden_0", measure=3)
    plain = split_loss(TOY, squared_error, "hidden_0")
    for call in (plain, lambda *rest: split_transcript(plain, *rest)):
        with refused("examples", rule='"x" and "y"', kind=InvalidType):
            call(TOY.init(KEY)[0], {"x": jnp.ones((2, 10))})
    with pytest.raises(TypeError, match="split: expected a Split"):
        split_transcript(squared_error, TOY.init(KEY)[0], data().examples)
    hidden = split_loss(TOY, squared_error, "hidden_0", decorrelation=1.0)
    with pytest.raises(ValueError, match="padding"):
        hidden(TOY.init(KEY)[0], data().examples, KEY)
