"""Learning without a server, from a config."""

import jax
import numpy as np
import pytest

from fedjax_sim import network
from fedjax_sim.config import registry
from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError, load
from tests.config.test_document import algorithm_of
from tests.refusals import refused

SMALL = ["data.num_clients=16", "data.held_out_clients=3", "model.hidden=[4]", "run.devices=1"]
SMALL += ["algorithm.num_steps=1"]
RING = "{name='ring'}"
NEEDED = {
    "degree": "4", "probability": "0.5", "num_blocks": "2", "inside": "0.9", "between": "0.5", "rate": "0.1",
    "graph": RING, "node": "3", "mixing": f"{{name='metropolis', graph={RING}}}",
}  # fmt: skip


def table(part, **more):
    """The part as an inline table, with what it needs."""
    required = [key for key, (_, default) in part.options.items() if default is registry.REQUIRED and key not in more]
    needed = {key: NEEDED[key] for key in required} | more
    return "{" + ", ".join([f"name='{part.name}'", *(f"{key}={value}" for key, value in needed.items())]) + "}"


def built(mixing, *more, name="dpsgd"):
    return algorithm_of(load(None, [*SMALL, f"algorithm.name={name}", f"algorithm.mixing={mixing}", *more]))


def kind():
    return registry.parts_of_table("algorithm")["dpsgd"].options["mixing"].kind


def test_every_graph_builds(tmp_path):
    """Catches a graph that a config can name but not build, or one of another size than the data's clients."""
    (tmp_path / "edges.csv").write_text("".join(f"{i},{(i + 1) % 16}\n" for i in range(16)))
    found = registry.named(registry.parts_of_table("algorithm")["pairwise_gossip"].options["graph"].kind)
    assert {"torus", "small_world", "from_csv"} <= found.keys() and "from_edges" not in found
    for name, part in found.items():
        graph = table(part, file=f"'{tmp_path}/edges.csv'") if name == "from_csv" else table(part)
        if name == "exponential":
            made = built(f"{{name='push', graph={graph}}}", name="push_sum")
        elif name == "remove_node":  # leaves one node fewer than the data have clients
            made = None
            with refused("mixing", value=15, rule="16 clients"):
                started(built(f"{{name='metropolis', graph={graph}}}"))
        else:
            made = built(f"{{name='metropolis', graph={graph}}}")
        assert made is None or started(made).tables["neighbours"].shape[1] == 16


def started(made):
    algorithm, spec, people = made
    return jax.eval_shape(algorithm.init, jax.random.key(0), spec, people)


def test_every_mixing_builds():
    """Catches a mixing that a config can name but not build."""
    for name, part in registry.named(kind()).items():
        made = built(table(part), name="push_sum" if name in ("push", "epidemic") else "dpsgd")
        assert made[0].parts is None, name


def test_tables_survive_a_file(tmp_path):
    """Catches options of a graph inside of a mixing inside of a mixing that a file forgets."""
    mixing = f"{{name='with_link_failures', rate=0.25, mixing={{name='laplacian', step=0.1, graph={RING}}}}}"
    config = load(None, [*SMALL, "algorithm.name=dpsgd", f"algorithm.mixing={mixing}"])
    (tmp_path / "config.toml").write_text(config.to_toml())
    again = load(tmp_path / "config.toml")
    assert again == config and again.identity() == config.identity()
    experiment = build(again)
    state = experiment.algorithm.init(experiment.key, experiment.params, experiment.data.train)
    np.testing.assert_allclose(state.tables["weights"], 0.1)
    assert state.tables["neighbours"].shape == (1, 16, 2) == (1, *network.ring(16).neighbours()[0].shape)


@pytest.mark.parametrize(
    "settings, told",
    [
        (["algorithm.mixing={name='metropolis'}"], "algorithm.mixing.graph: expected a table with a name, got nothing"),
        (
            [f"algorithm.mixing={{name='laplacian', step=3.0, graph={RING}}}"],
            "algorithm.mixing.step: expected a number",
        ),
        (["algorithm.mixing={name='metropolis', graph={name='hypercub'}}"], "Did you mean 'hypercube'"),
        ([f"algorithm.mixing={NEEDED['mixing']}", "sampler.cohort_size=4"], "sampler: expected no such table"),
        ([f"algorithm.mixing={NEEDED['mixing']}", "algorithm.barrier=nobody"], "algorithm.barrier: expected one of"),
        (["algorithm.mixing={name='push', graph={name='exponential'}}"], "mixing: expected one that keeps"),
    ],
)
def test_what_is_refused(settings, told):
    """Catches a wrong graph that is found after the data were loaded, or never."""
    with pytest.raises(ConfigError) as caught:
        build(load(None, [*SMALL, "algorithm.name=dpsgd", *settings]))
    assert any(told in text for text in caught.value.problems), caught.value.problems


def test_devices_give_time():
    """Catches devices of a config that gossip never gets."""
    made = built(NEEDED["mixing"], "devices.name=cross_silo", "algorithm.barrier=local")
    state = started(made)
    _, info = jax.eval_shape(made[0].step, jax.random.key(0), state, made[2])
    assert state.clock.seconds.shape == (16,) and {"simulated_seconds", "first_seconds"} <= info.keys()
