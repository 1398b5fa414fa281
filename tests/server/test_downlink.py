"""The compressed broadcast."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, client, engine, population, sampling, server, theory, transform
from fedjax_sim.server import downlink
from fedjax_sim.transform.chain import wire_of
from fedjax_sim.types import ClientUpdate, Noise, Report
from tests.laws import cases, laws, problems as p
from tests.refusals import refused

KEY = jax.random.key(0)
SGD, MOMENTUM = server.optimizer(optax.sgd(1.0)), server.optimizer(optax.sgd(0.7, momentum=0.9))


def noisy(key, aggregate, state):
    """A server's step that uses its key."""
    return MOMENTUM.apply(key, aggregate + 0.01 * jax.random.normal(key, aggregate.shape), state)


def drawn(key, broadcast, state, data):
    """A message whose sign is the broadcast's last bit: no program rounds it otherwise, and it compiles quickly."""
    last = jax.lax.bitcast_convert_type(broadcast, jnp.uint32) % 2
    return Report(jnp.where(last == 1, -1, 1) * jax.random.uniform(key, broadcast.shape), jnp.float32(1), {}), state


WORK = ClientUpdate(lambda params: (), drawn)
NOTHING = {"identity": transform.identity, "top_k": lambda: transform.top_k(1.0)}


@pytest.mark.optimised(False)  # of copies
def test_what_comes_through_is_the_models():
    """Catches a replica that is w' + fl(w - w'), which is not w where a server's model is much smaller than before."""
    rng = np.random.default_rng(0)
    old, new = np.float32(rng.normal(size=100)), np.float32(1e-3 * rng.normal(size=100))
    assert (old + (new - old) != new).any()
    made = downlink(
        SGD._replace(apply=lambda key, aggregate, state: state._replace(params=aggregate)), transform.identity()
    )
    laws.check_equal_bits(made.broadcast(made.apply(KEY, new, made.init(old))), new, "replica")


@pytest.mark.full
@pytest.mark.optimised
@pytest.mark.parametrize("name", cases.rows(NOTHING, ["top_k"]))
def test_identity_changes_no_bit(name):
    """With nothing left out, the round without it. Catches a key of the server's that is used up."""
    inner = MOMENTUM._replace(apply=noisy)
    plain = p.Federation(client=WORK, server=inner).run(p.COHORT, num_rounds=5)
    down = p.Federation(client=WORK, server=downlink(inner, NOTHING[name]())).run(p.COHORT, num_rounds=5)
    laws.check_equal_bits(plain[0].server, down[0].server.server, "model")
    laws.check_equal_bits(plain[0].server.params, down[0].server.replica, "replica")
    for one, other in zip(plain[1], down[1], strict=True):
        assert one["update_norm"].tobytes() == other["update_norm"].tobytes()


@pytest.mark.optimised(False)  # of copies
def test_replica_follows_the_model():
    """Top-2 of each difference, in float64 over rounds. Catches a model that is moved by what was sent, differences to
    the last model instead of the replica, and clients that train from the model."""
    made = downlink(server.optimizer(optax.sgd(0.5)), transform.top_k(count=2))
    params = {"w": jnp.array([1.0, -2.0, 3.0]), "half": jnp.array([0.5, 0.25], jnp.bfloat16)}
    state = made.init(params)
    laws.check_equal_bits(made.broadcast(state), params, "first broadcast")
    model, replica = p.flat(params), p.flat(params)
    apply = jax.jit(made.apply)
    rng = np.random.default_rng(0)
    for _ in range(6):
        aggregate = {"w": jnp.array(rng.integers(-8, 9, 3) / 4, jnp.float32), "half": jnp.array([0.5, -0.5])}
        state = apply(KEY, aggregate, state)
        model = model + 0.5 * p.flat(aggregate)
        missing = model - replica
        chosen = np.argsort(-np.abs(missing), kind="stable")[:2]
        replica[chosen] = model[chosen]
        np.testing.assert_array_equal(p.flat(made.params(state)), model)
        np.testing.assert_array_equal(p.flat(made.broadcast(state)), replica)
    assert made.broadcast(state)["half"].dtype == jnp.bfloat16 and np.abs(model - replica).max() > 0


def test_chains_keep_their_order():
    """Two entries of four at 15 levels, and their bytes. Catches a chain that is applied backwards, or whose empty
    state is handed on as no state at all."""
    sparse, coarse = transform.top_k(count=2), transform.quantize(4, rounding="nearest")
    made = downlink(SGD, transform.chain(sparse, coarse))
    state = made.apply(KEY, jnp.array([8.0, -0.5, 4.0, 1.0]), made.init(jnp.zeros(4)))
    np.testing.assert_allclose(p.flat(state.replica), [8, 0, 4, 0], atol=8 / 14 + 1e-6)
    assert (p.flat(state.replica) != 0).tolist() == [True, False, True, False]
    spec = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert made.wire(spec).bits == wire_of(transform.chain(sparse, coarse), spec).bits < wire_of(sparse, spec).bits


@functools.cache
def by_its_name():
    return p.Federation(server=MOMENTUM, downlink=transform.quantize(3))


@pytest.mark.full
@pytest.mark.optimised(False)  # of one program under two names
def test_federated_wraps_its_server():
    """Catches a `downlink` that is dropped, or wrapped around twice, and parts that still show the server within."""
    member = transform.quantize(3)
    by_name = by_its_name()
    ours, by_hand = by_name.run(p.COHORT), p.Federation(server=downlink(MOMENTUM, member)).run(p.COHORT)
    laws.check_equal_bits(ours[0], by_hand[0], "state")
    laws.check_equal_bits(ours[1], by_hand[1], "info")
    spec = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert by_name.algorithm.parts.server.wire(spec) == wire_of(member, spec)


def test_a_memory_is_refused():
    """Catches a residual that is counted twice, once in the memory and once in the difference: the replica diverges."""
    with refused("downlink", rule="without a memory"):
        downlink(SGD, transform.error_feedback(transform.top_k(0.5))).init(jnp.array(p.START))


def distance(member):
    """|w - w*| after 400 rounds of everybody's one gradient step, clients training from the replica."""
    data = population.quadratics(num_clients=8, dimension=12)
    best = theory.quadratic_optimum(np.asarray(data.test["hessian"]), np.asarray(data.test["center"]))
    algorithm = algorithms.federated(
        sampling.full(8),
        client.local_sgd(population.quadratic_loss, optax.sgd(0.2), client.work(num_steps=1)),
        aggregation.mean(),
        downlink(SGD, member),
        mesh=None,
        plan=engine.Plan(4, 8),
    )
    state = algorithm.init(KEY, {"w": jnp.zeros(12)}, data.train)

    @jax.jit
    def run(state, data):
        def body(state, key):
            state, info = algorithm.step(key, state, data)
            return state, info["downlink_bytes"].number

        return jax.lax.scan(body, state, jax.random.split(KEY, 400))

    state, _ = run(state, data.train)
    return np.linalg.norm(np.asarray(algorithm.params(state)["w"], np.float64) - best)


COMPRESSED = {
    "8 bits": lambda: transform.quantize(8),
    "2 bits": lambda: transform.quantize(2),
    "top 2 of 12": lambda: transform.top_k(count=2),
}


@pytest.mark.full
@pytest.mark.parametrize("name", cases.rows(COMPRESSED, ["8 bits"]))
def test_compressed_broadcast_converges(name):
    """The replica's own feedback makes each exact. Catches a replica that drifts."""
    assert distance(COMPRESSED[name]()) < 1e-5


@pytest.mark.full
def test_bytes_of_the_message():
    """Catches a broadcast counted plain, or for who reported instead of who was invited."""
    made = downlink(SGD, transform.quantize(3))
    spec = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert made.wire(spec) == wire_of(transform.quantize(3), spec)
    _, infos = by_its_name().run(p.cohort(p.COHORT, reported=np.arange(p.SLOTS) < 4), num_rounds=1)
    assert infos[0]["downlink_bytes"].total() == p.SLOTS * -(-made.wire(spec).bits // 8)
    assert infos[0]["uplink_bytes"].total() == 4 * 12


def test_servers_around_it_keep_its_bytes():
    """Catches a compressed broadcast counted plain, or without what is sent beside it."""
    inner, model = downlink(SGD, transform.quantize(8)), jnp.zeros(100)
    bits = wire_of(transform.quantize(8), model).bits
    around = {
        server.dynamic(inner, 1.0): 0,
        server.last_two(inner): 0,
        server.rescaled(inner): 0,
        server.control_variates(inner): 3200,
        server.statistics(inner, lambda params: {"first": params, "count": jnp.zeros(())}, lambda g, s: s): 3232,
    }
    for made, beside in around.items():
        assert made.wire(made.broadcast(made.init(model))).bits == bits + beside
    assert server.control_variates(SGD).wire is None


@pytest.mark.full
@pytest.mark.optimised
def test_bits_do_not_depend_on_devices():
    """Catches a difference whose rounding another program changes."""
    made = downlink(MOMENTUM, transform.quantize(3))
    rounds = [p.Federation(client=WORK, server=made, mesh=mesh) for mesh in (None, engine.device_mesh())]
    runs = [federation.run(p.COHORT, num_rounds=3) for federation in rounds]
    laws.check_equal_bits(runs[0][0].server, runs[1][0].server, "devices")


def test_what_is_refused():
    """Catches noise on the way down, integers that nobody sums, states that clients would keep, replicas that drift."""
    noise = Noise("gaussian", "central", 1.0, 1.0, "client")
    with refused("downlink", rule="without noise"):
        downlink(SGD, transform.identity().stating(noise=noise))
    with refused("downlink", rule="sends numbers"):
        downlink(SGD, transform.quantize(8, range=1.0, integers=True))
    with pytest.raises(ValueError, match="downlink: expected no state"):
        downlink(SGD, transform.ef21(transform.top_k(0.5), 3)).init(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"\|Q\(x\) - x\|\^2"):
        downlink(SGD, transform.random_k(count=1)).init(jnp.zeros(3))
    for few in (transform.quantize(2), transform.rotated(transform.quantize(2))):  # exact on equal entries
        with refused("downlink", rule="|Q(x) - x|^2") as raised:
            downlink(SGD, few).init(jnp.zeros(500))
        assert raised.value.value.startswith(("1.", "2."))
    with pytest.raises(ValueError, match="params: expected a broadcast of floats"):
        downlink(SGD, transform.identity()).init({"w": jnp.zeros(3), "step": jnp.zeros((), jnp.int32)})
    with pytest.raises(TypeError, match="server: expected a ServerUpdate"):
        downlink(server.replacement, transform.identity())
    with pytest.raises(TypeError, match="downlink: expected an UpdateTransform"):
        downlink(SGD, transform.identity)
