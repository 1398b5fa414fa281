"""A hierarchy in a config: groups of the data, and the parts of the edges as tables inside `[algorithm]`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import transform
from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.round.round import invite
from fedjax_sim.types import Wire
from tests.config.test_document import algorithm_of

SMALL = ["data.num_clients=40", "data.held_out_clients=3", "model.hidden=[4]", "run.devices=1"]
HIERARCHY = [*SMALL, "data.with_groups.num_groups=4", "algorithm.name=hierarchical_fedavg", "sampler.name=full"]


def test_a_hierarchy_in_a_config(tmp_path):
    """Faults: edges with the cloud's sampler, or one of another size than their groups; a wrapper that loses what it
    wraps, in a file or in a run's identity."""
    inner = "algorithm.edge_sampler={name='with_dropout', rate=%s, sampler={name='uniform', cohort_size=3}}"
    edge = ["algorithm.edge_aggregator.name=median", "algorithm.server_optimizer={name='sgd', momentum=0.9}"]
    config = load(None, [*HIERARCHY, *edge, inner % 0.1, "run.lanes=2"])
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load(tmp_path / "config.toml") == config
    assert load(None, [*HIERARCHY, *edge, inner % 0.2, "run.lanes=2"]).identity() != config.identity()
    cloud = build(config).algorithm.parts
    star = cloud.client.federation
    assert (cloud.sampler.design.population_size, cloud.sampler.num_slots) == (4, 4)
    design = star.sampler.design
    assert (design.population_size, design.num_slots, design.response_rates) == (10, 3, (0.9,))
    assert star.execution.plan == (2, 2) and cloud.execution.plan is None
    assert star.aggregator.rule is not None and cloud.aggregator.rule is None


def test_transforms_of_an_edge(tmp_path):
    """Faults: one of several transforms, another order, a wrapper's own that is lost, and another run's identity."""
    options = "{clip={clip_norm=0.5}, error_feedback={top_k={share=0.5}}, quantize={bits=8}}"
    config = load(None, [*HIERARCHY, f"algorithm.edge_transform={options}", "run.lanes=2"])
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load(tmp_path / "config.toml") == config
    turned = "{quantize={bits=8}, clip={clip_norm=0.5}, error_feedback={top_k={share=0.5}}}"
    assert load(None, [*HIERARCHY, f"algorithm.edge_transform={turned}", "run.lanes=2"]).identity() != config.identity()
    told, *_ = algorithm_of(
        load(None, [*HIERARCHY, f"algorithm.edge_transform={options}", "algorithm.keep_edges=true"])
    )
    found = told.parts.client.federation.transform
    spec = jax.ShapeDtypeStruct((100,), jnp.float32)
    by_hand = transform.chain(
        transform.clip(0.5), transform.error_feedback(transform.top_k(share=0.5)), transform.quantize(8)
    )
    assert found.wire(spec, Wire(100, 3200)) == by_hand.wire(spec, Wire(100, 3200))
    key, x = jax.random.key(1), jnp.linspace(-1.0, 1.0, 100)
    sent = [jax.jit(t.on_client)(key, x, t.init(x), t.init_client(x))[0] for t in (found, by_hand)]
    jax.tree.map(np.testing.assert_array_equal, *sent)


FAST, SLOW = (f"{{name='heterogeneous', speed={x}, bandwidth_down=1e6, bandwidth_up=1e6}}" for x in (1e6, 1e3))
TIMED = [*HIERARCHY, "sampler.with_clock.overhead_seconds=0.5", "algorithm.num_steps=2", "algorithm.batch_size=5"]


@pytest.mark.full
def test_time_inside_of_edges(tmp_path):
    """[devices] are the edges' links, and what clients run on unless [algorithm.edge_devices] says so. Faults: devices
    of places in a group, a table that nobody reads, and one that another run's identity lacks."""
    found = {}
    for name, more in (("fast", []), ("slow", [f"algorithm.edge_devices={SLOW}"])):
        config = load(None, [*TIMED, f"devices={FAST}", *more])
        (tmp_path / "config.toml").write_text(config.to_toml())
        assert load(tmp_path / "config.toml") == config
        made = build(config)
        assert made.algorithm.parts.sampler.devices.population_size == 4
        state = made.algorithm.init(made.key, made.params, made.data.train)
        members = state.sampler.sampler.price.inside.ids
        assert members.shape == (4, 10) and sorted(members.ravel().tolist()) == list(range(40))
        found[name] = round_seconds(made.algorithm.parts, made.key, state)
        found[f"{name} identity"] = config.identity()
    assert found["slow"] - 0.5 > 100 * (found["fast"] - 0.5) > 0
    assert found["slow identity"] != found["fast identity"]


def round_seconds(star, key, state):
    return float(invite(star, key, state)[0].metrics["round_seconds"])


@pytest.mark.parametrize(
    "setting, told",
    [
        (["devices.name=cross_device"], "devices: expected devices that are always there, inside of a hierarchy"),
        (
            [f"devices={FAST}", "algorithm.edge_devices.name=cross_device"],
            "devices: expected devices that are.*edge_devices",
        ),
        ([f"devices={FAST}", "algorithm.edge_devices.nam=x"], "algorithm.edge_devices.name: expected one of"),
    ],
)
def test_wrong_devices_of_edges(setting, told):
    """Fault: presence inside of edges that no clock looks at."""
    with pytest.raises(ConfigError, match=told):
        build(load(None, [*TIMED, *setting]))
    with pytest.raises(ConfigError, match="edge_devices: expected None"):
        build(load(None, [*HIERARCHY, f"algorithm.edge_devices={SLOW}"]))


@pytest.mark.parametrize(
    "setting, told",
    [
        (
            "edge_sampler={name='weighted', cohort_size=2}",
            "edge_sampler.name: expected one of cyclic, .*got 'weighted'",
        ),
        ("edge_sampler={name='with_dropout', rate=0.1}", "edge_sampler.sampler: expected a table with a name"),
        (
            "edge_sampler={name='uniform', cohort_size=40}",
            r"edge_sampler.cohort_size: expected an integer in \[1, 10\]",
        ),
        ("edge_aggregator={name='keep_old'}", "edge_aggregator.name: expected one of"),
        ("edge_transform={clip={clip_norm=-1.0}}", "algorithm.edge_transform.clip.clip_norm: expected"),
        ("edge_transform={clp={clip_norm=1.0}}", "algorithm.edge_transform.clp: expected one of .*Did you mean 'clip'"),
        ("edge_transform={}", "algorithm.edge_transform.name: expected one of"),
        ("edge_weighting=clients", "algorithm.*weighting: expected one of"),
        ("edge_rounds=0", "algorithm.*rounds: expected an integer"),
    ],
)
def test_wrong_hierarchies(setting, told):
    """Fault: an edge with other parts than the config says, in silence."""
    with pytest.raises(ConfigError, match=told):
        build(load(None, [*HIERARCHY, f"algorithm.{setting}"]))


@pytest.mark.parametrize("plan", [[], ["run.lanes=2"]])
def test_a_hierarchy_without_groups(plan):
    """Fault: a TypeError with its traceback for a config whose data nobody grouped."""
    flat = [text for text in HIERARCHY if "with_groups" not in text]
    edges = "algorithm.edge_sampler={name='poisson', rate=0.5}"
    with pytest.raises(ConfigError, match=r"^algorithm: population: .*with_groups"):
        build(load(None, [*flat, edges, *plan]))
