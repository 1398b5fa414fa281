"""Every row lowers for CUDA and TPU, on a machine that has none of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fedjax_sim import aggregation, engine
from fedjax_sim.algorithms import federated
from fedjax_sim.engine.arithmetic import barrier
from tests.laws import cases, problems as p, test_compositions

PLATFORMS = ("cuda", "tpu")  # what a CPU takes, all other tests show
DEFAULT = {  # what differs by platform: barriers, exact sums, selections, client memory, local loops
    "algorithms": ("dpsgd", "fedavg", "fedbuff", "pairwise_gossip", "scaffold", "split_gnn"),
    "transform": ("top_k", "gaussian_mechanism", "quantize integers"),
    "sampling": ("uniform",),
    "aggregation": ("gather", "extrapolated"),
    "server": ("downlink",),
    "client": ("private_sgd",),
}


def algorithm(kind: str, name: str):
    """An algorithm with this row in its place."""
    if kind == "algorithms":
        return cases.CASES[kind][name]()
    parts = {"sampler": cases.SAMPLER, "client": cases.CASES["client"]["local_sgd"]()}
    parts |= {"aggregator": aggregation.mean(), "server": cases.CASES["server"]["optimizer"]()}
    if kind == "transform":
        member = test_compositions.MEMBERS[name]()
        parts |= {"transform": member, "aggregator": test_compositions.aggregator_for(name)}
    else:
        row = cases.CASES[kind][name]
        parts[{"sampling": "sampler", "aggregation": "aggregator"}.get(kind, kind)] = row()
        parts |= {other: make() for other, make in row.needs.items()}
    if kind == "sampling":
        parts["aggregator"] = aggregation.fixed_mean(7.0)
    return federated(**parts, **cases.RUN)


def rows(kind: str) -> list[str]:
    """Those that stand in a federation; the algorithms of the others are rows, too."""
    found = test_compositions.MEMBERS if kind == "transform" else cases.CASES[kind]
    alone = {name for name, row in found.items() if row.alone}
    return sorted(alone - (cases.integer_sums() if kind == "aggregation" else set()))


def lowered(kind: str, names) -> list[str]:
    """What went wrong, a line each."""
    wrong = []
    for platform in PLATFORMS:
        with engine.compiling_for(platform):
            for name in names:
                made = algorithm(kind, name)
                start = jnp.array(p.START) if kind == "transform" else cases.CASES[kind][name].start()
                state = jax.eval_shape(made.init, jax.random.key(0), start, p.ragged())
                traced = jax.jit(made.step).trace(jax.random.key(0), state, p.ragged())
                text = traced.lower(lowering_platforms=(platform,)).as_text()
                if "custom_call @xla_python" in text:
                    wrong.append(f"{name} calls Python on {platform}")
    return wrong


@pytest.mark.default_rows("client")
@pytest.mark.parametrize("kind", DEFAULT)
def test_rows_lower(kind):
    """Catches code that only a CPU's compiler takes, or that calls the host where it need not."""
    assert lowered(kind, DEFAULT[kind]) == []


@pytest.mark.full
@pytest.mark.parametrize("kind", DEFAULT)
def test_every_row_lowers(kind):
    """The same of all rows."""
    assert lowered(kind, [name for name in rows(kind) if name not in DEFAULT[kind]]) == []


def test_code_chooses_by_the_target():
    """Catches a barrier, or lanes, that follow the machine on which a program is made."""

    def text(platform):
        with engine.compiling_for(platform):
            traced = jax.jit(lambda x: barrier.computed_once(x, x)).trace(jnp.ones(8))
            return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "while" in text("cpu") and "while" not in text("cuda") and "while" not in text("tpu")
    spec, lanes = jax.ShapeDtypeStruct((100_000,), jnp.float32), []
    for platform in ("cpu", "tpu"):
        with engine.compiling_for(platform):
            lanes.append(engine.plan_for(spec, num_slots=5000).lanes)
    assert lanes[0] == 1 and lanes[1] > 1000
    assert engine.target() == jax.default_backend()
