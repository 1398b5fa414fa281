"""A link between two parties: what passes, either way, what it costs, and who sees it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine, transform
from fedjax_sim.network.link import Link, Transcript, link, send, transcript, wires

KEY = jax.random.key(3)
X = jax.random.normal(jax.random.key(1), (5, 4))
W = jax.random.normal(jax.random.key(2), (4, 3))
NOISY = {"forward": transform.local_gaussian(1.0, 0.1), "backward": transform.qsgd(4)}


def loss(through, x, w, key=KEY):
    return (jnp.tanh(send(through, key, x, "top") @ w) ** 2).sum(1)


def slope(through, x, there=None):
    """The gradient of a batch's sum, over the rows that are there."""
    weigh = (lambda losses: losses) if there is None else lambda losses: jnp.where(there, losses, 0)
    return np.asarray(jax.jit(jax.grad(lambda x: weigh(loss(through, x, W)).sum()))(x))


def test_an_identity_link_changes_nothing():
    """Catches a custom derivative, a cast or a copy that a plain link leaves in the program."""

    def plain(x, w):
        return (jnp.tanh(x @ w) ** 2).sum()

    for made in (link(), link(encrypted=True, batch_bits=8)):
        texts = [
            jax.jit(jax.value_and_grad(f, (0, 1))).lower(X, W).as_text().replace("linked", "plain")
            for f in (plain, lambda x, w, made=made: (jnp.tanh(send(made, KEY, x, "top") @ w) ** 2).sum())
        ]
        assert texts[0].split("{", 2)[2] == texts[1].split("{", 2)[2]
    exact = link(forward=transform.identity(), backward=transform.identity())
    both = [jax.grad(lambda x, made=made: loss(made, x, W).sum())(X) for made in (exact, link())]
    assert (both[0] == both[1]).all()


def test_two_machines():
    """Catches a gradient at what was sent instead of at what arrived, and one that misses its own transform."""
    made = link(forward=transform.stateless(lambda key, x: jnp.round(x)), backward=transform.top_k(count=2))
    arrived = np.round(X)  # at the second machine
    there = jax.jit(jax.grad(lambda x: (jnp.tanh(x @ W) ** 2).sum()))(arrived)
    kept = np.abs(there) >= np.sort(np.abs(there), 1)[:, -2:-1]
    got = slope(made, X)
    np.testing.assert_array_equal(got, np.where(kept, there, 0))
    np.testing.assert_array_equal(jax.jit(lambda x: send(made, KEY, x))(X), arrived)
    seen = transcript(lambda tap: (jnp.tanh(tap(made, KEY, X, 0, 1, name="top") @ W) ** 2).sum())
    assert [(m.source, m.target, m.kind) for m in seen.messages] == [(0, 1, "activations"), (1, 0, "gradients")]
    np.testing.assert_array_equal(seen.seen_by(1)[0].value, arrived)
    np.testing.assert_array_equal(seen.seen_by(0)[0].value, got)


@pytest.mark.full
def test_transcripts_draw_as_gradients_do():
    """Catches a gradient that is told with another draw than the one it is sent with."""
    noisy = link(**NOISY)
    step = lambda tap: (jnp.tanh(tap(noisy, KEY, X, 0, 1, name="top") @ W) ** 2).sum()  # noqa: E731
    back = transcript(step).seen_by(0)[0].value
    np.testing.assert_array_equal(back, jax.grad(lambda x: loss(noisy, x, W).sum())(X))  # the same draws


def test_examples_are_messages_of_their_own():
    """Catches scales or norms over a batch, draws that examples share, and noise on the gradient of padding."""
    made = link(**NOISY)
    got = slope(made, X)
    padded = np.concatenate([X, np.full((3, 4), 1e6, np.float32)])
    mask = np.arange(8) < 5
    more = slope(made, padded, mask)
    np.testing.assert_allclose(more[:5], got, rtol=1e-6)  # a product of more rows may be summed in another order
    assert (more[5:] == 0).all()
    noise = link(backward=transform.local_gaussian(1.0, 1.0))
    drawn = slope(noise, padded, mask)
    assert (drawn[5:] == 0).all() and (drawn[:5] != 0).all()
    same, one, two = jax.device_get(
        jax.jit(lambda x, y: (send(made, KEY, x), *(send(made, KEY, y, n) for n in ("one", "two"))))(
            np.broadcast_to(X[:1], X.shape), X
        )
    )
    assert len(np.unique(same, axis=0)) == 5 and (one != two).any()
    assert (send(made, None, X) == send(made, None, X)).all()


def test_bytes_are_counted():
    """Catches a way that is not counted, bits of a batch, and the indices of a sparse message."""
    example = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert [wire.bits for wire in wires(link(), example)] == [128, 128]
    there, back = wires(link(forward=transform.quantize(8), backward=transform.top_k(count=1)), example)
    assert (there.payload_bits, there.side_bits) == (32, 32) and back.bits == 32 + 2
    assert link(batch_bits=8).batch_bits == 8 and link(encrypted=True, batch_bits=8).batch_bits == 232


def test_encrypted_messages_are_random_words():
    """Catches a pad that is used twice, and a message that a third party reads."""
    x = jnp.zeros((500, 4))

    def step(tap, made):
        y = tap(made, KEY, x, 0, 1, name="a")
        return tap(made, KEY, y, 1, 2, name="b").sum()

    seen = transcript(lambda tap: step(tap, link(encrypted=True)))
    assert isinstance(seen, Transcript) and (seen.messages[0].value == 0).all()
    words = [np.asarray(m.value) for m in seen.overheard(KEY)]
    assert all(w.dtype == np.uint32 and len(w) == 2000 for w in words)
    assert all((words[i] != words[j]).mean() > 0.99 for i in range(4) for j in range(i))
    ones = np.unpackbits(np.concatenate(words).view(np.uint8)).mean()  # 256,000 bits: std 0.001, 6 sigma is 2e-9
    assert abs(ones - 0.5) < 0.006
    plain = transcript(lambda tap: step(tap, Link())).overheard(KEY)
    assert (plain[0].value == 0).all() and plain[0].kind == "activations"


def test_links_that_cannot_be():
    """Catches transforms that keep a memory, that act at a server, and noise that nobody would add."""
    for name, made, words in (
        ("forward", transform.error_feedback(transform.top_k(0.5)), "without state"),
        ("backward", transform.gaussian_mechanism(1.0, 1.0), "central"),
        ("forward", transform.quantize(4, range=1.0, integers=True), "integers"),
        ("forward", transform.distributed_gaussian(1.0, 1.0, 4), "distributed"),
    ):
        with pytest.raises(ValueError, match=words):
            link(**{name: made})
    scaled = transform.identity()._replace(on_server=lambda key, cohort, x, *rest: (x * 2, (), {}))
    with pytest.raises(ValueError, match="at the server"):
        link(forward=scaled)
    with pytest.raises(TypeError, match="forward"):
        link(forward="quantize")


@pytest.mark.default_rows("tpu")
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_links_lower(platform):
    """Catches code that only a CPU's compiler takes."""
    step = jax.jit(jax.grad(lambda x: loss(link(**NOISY), x, W).sum()))
    with engine.compiling_for(platform):
        assert "custom_call @xla_python" not in step.trace(X).lower(lowering_platforms=(platform,)).as_text()


def test_batch_mates_do_not_matter():
    """As clients under vmap and steady arithmetic, in another order beside others: catches draws by lane."""
    step = jax.jit(jax.vmap(engine.reproducible(jax.grad(lambda x, key: loss(link(**NOISY), x, W, key).sum()))))
    x, order = np.asarray(X), np.array([2, 0, 2, 1])
    keys, xs = jax.random.split(KEY, 4), np.stack([x, 2 * x, -x, x + 1])
    np.testing.assert_array_equal(np.asarray(step(xs, keys))[order], step(xs[order], keys[order]))
