"""DESIGN and its pages: skeletons run and do what they say; pages, files and names that they tell of are there."""

from __future__ import annotations

import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_sim
from fedjax_sim import algorithms, engine, metrics, population, run, server
from fedjax_sim.population.protocol import sizes_of
from fedjax_sim.types import Cohort, Outcome, Received, Round
from tests.refusals import refused

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fedjax_sim"
ENTRY = ROOT / "DESIGN.md"
PAGES = sorted((ROOT / "docs" / "design").glob("*.md"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in (ENTRY, *PAGES)}
TEXT = "\n".join(TEXTS.values())
HEADINGS = ["Context", "Decision", "What was measured", "What was rejected"]
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def skeletons():
    """Every public name of the blocks; each block runs alone, so that it must hold its own imports."""
    found = {}
    for path, text in TEXTS.items():
        for block in re.findall(r"```python\n(.*?)```", text, re.S):
            assert max(map(len, block.splitlines())) <= 120
            names = {"__name__": "skeleton"}
            exec(compile(block, path.name, "exec", dont_inherit=True), names)
            found |= names
    return found


def test_files_and_names_exist():
    """Catches a file that was moved, and a name that was changed, without its page."""
    paths = set(re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)(?:::\w+)?`", TEXT))
    assert len(paths) > 50
    assert [path for path in sorted(paths) if not any((base / path).exists() for base in (PACKAGE, ROOT))] == []
    files = {path.name for path in PACKAGE.rglob("*.py")}
    alone = set(re.findall(r"`(\w+\.py)`", TEXT))  # a file of the folder that was named before it
    assert alone <= files, alone - files
    modules = [*fedjax_sim.SUBPACKAGES, "prng", "tree", "types", "validate"]
    names = set(re.findall(rf"`({'|'.join(modules)})\.(\w+)", TEXT))
    assert len(names) > 20
    for module, name in sorted(pair for pair in names if pair[1] not in ("json", "jsonl", "py")):  # files
        assert hasattr(importlib.import_module(f"fedjax_sim.{module}"), name), f"{module}.{name}"


def links(path: pathlib.Path) -> list[str]:
    """The pages and files that a page links to, as it writes them."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", TEXTS[path], flags=re.S))
    return [link.partition("#")[0] for link in found if not link.startswith(("http:", "https:", "#"))]


def test_links_resolve():
    """Catches a link to a page that was renamed."""
    assert [(page.name, link) for page in TEXTS for link in links(page) if not (page.parent / link).exists()] == []


def test_every_page_is_in_the_table():
    """Catches a page that nobody finds, and a page that is in the table twice."""
    rows = re.findall(r"^\| \[[^]]+\]\(docs/design/(\w+)\.md\) \| \S", TEXTS[ENTRY], re.M)
    assert sorted(rows) == [path.stem for path in PAGES]


def test_a_page_is_one_decision():
    """Catches a page without a decision or its question, and headings of another kind or order."""
    for path in PAGES:
        text = re.sub(r"```.*?```", "", TEXTS[path], flags=re.S)
        assert text.startswith("# ") and len(re.findall(r"^# ", text, re.M)) == 1, path.name
        headings = re.findall(r"^## (.*)$", text, re.M)
        assert headings[:2] == ["Context", "Decision"], path.name
        assert headings == [heading for heading in HEADINGS if heading in headings], path.name


def test_parts_of_a_round(skeletons):
    """Catches a skeleton without its imports, and one that no round takes."""
    slopes, x = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([0.5, 1.0, 1.5])
    clients = skeletons["Lines"](slopes, x, 4)
    assert sizes_of(clients).tolist() == [1, 2, 3, 1]
    algorithm = algorithms.federated(
        sampler=skeletons["power_of_choice"]([1, 2, 3, 1], 3, 4),
        client=skeletons["sign_descent"](lambda w, rows, key: (w * rows["x"] - rows["y"]) ** 2, 0.5),
        transform=skeletons["halve"](),
        aggregator=skeletons["geometric_median"]().stating(weighted=False),
        server=server.optimizer(optax.sgd(1.0)),
        mesh=None,
    )
    state, history = run(KEY, algorithm, jnp.zeros(()), clients, 2)
    assert float(algorithm.params(state)) == 0.5 and history.records[1]["local_loss"] < history.records[0]["local_loss"]
    assert int(jnp.isfinite(state.sampler).sum()) == 4


def carried(rule, updates, weights):
    """An aggregator's carry of messages [m, ...] of clients 0, ..., m - 1."""
    empty = rule.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), updates), len(weights))
    ids = jnp.arange(len(weights), dtype=jnp.int32)
    received = Received(updates, jnp.asarray(weights, jnp.float32), ids, ids)
    return rule.accumulate(KEY, None, empty, received)


def test_geometric_median(skeletons):
    """It is where unit vectors to the messages, times their weights, add up to zero; in NumPy.

    Catches leaves that are measured apart, weights left out, absent rows that count, a mean that an outlier moves.
    """
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(9, 4)).astype(np.float32)
    updates[3] += 1e4
    weights = np.array([1, 2, 1, 1, 3, 1, 2, 1, 0])
    updates[8] = 0
    rule = skeletons["geometric_median"](num_steps=200)
    pair = {"a": jnp.array(updates[:, :3]), "b": jnp.array(updates[:, 3])}
    found, _ = rule.finalize(KEY, None, carried(rule, pair, weights))
    away = updates[:8].astype(float) - np.append(found["a"], found["b"])
    unit = away / np.linalg.norm(away, axis=1, keepdims=True)
    np.testing.assert_allclose(weights[:8] @ unit, 0, atol=1e-3)
    assert np.abs(np.append(found["a"], found["b"])).max() < 2


def test_a_rule_with_memory(skeletons):
    """Two rounds of centred clipping, in NumPy. Catches a centre that is not the last result, a clip of the mean."""
    rng, weights, center = np.random.default_rng(1), np.array([1.0, 3.0, 2.0, 0.0]), np.zeros(3)
    rule = skeletons["centered_clip"](1.5)
    state, nobody = rule.start(jax.ShapeDtypeStruct((3,), jnp.float32)), jnp.zeros(4, bool)
    for _ in range(2):
        updates = rng.normal(size=(4, 3)) * np.array([[0.1], [1], [30], [0]])
        round = Round(Cohort(jnp.arange(4), nobody, nobody), state=state)
        found, _, state = rule.finalize(KEY, round, carried(rule, jnp.array(updates, jnp.float32), weights))
        away = updates - center
        clipped = away * np.minimum(1, 1.5 / np.maximum(np.linalg.norm(away, axis=1, keepdims=True), 1e-9))
        center = center + weights @ clipped / weights.sum()
        np.testing.assert_allclose(found, center, rtol=1e-5)
        np.testing.assert_array_equal(found, state)


def test_a_sampler_that_learns(skeletons):
    """Catches candidates that are not drawn by weight, losses of other clients, a lost message that erases a loss."""
    choose, everyone = skeletons["power_of_choice"], 5
    sampler = choose(np.ones(everyone), 2, everyone)
    state, seen = sampler.init(), []
    losses = jnp.array([0.3, 0.9, 0.1, 0.5, 0.7])
    for t in range(4):
        cohort, state = sampler.sample(jax.random.fold_in(KEY, t), state)
        arrived = jnp.array([True, t != 3])
        state = sampler.observe(state, cohort, Outcome(arrived, jnp.where(arrived, losses[cohort.ids] + t, jnp.nan)))
        seen.append(cohort.ids.tolist())
    assert sorted(seen[0] + seen[1] + seen[2][:1]) == [0, 1, 2, 3, 4]  # unseen ones first
    known = np.full(everyone, np.nan)
    for t, ids in enumerate(seen):
        if t == 3:
            assert set(ids) == set(np.argsort(known)[-2:].tolist())
        for slot, id in enumerate(ids):
            known[id] = known[id] if (t, slot) == (3, 1) else losses[id] + t
    np.testing.assert_allclose(state, known, rtol=1e-6)
    weights = np.array([1.0, 2, 3, 4])
    ids = jax.vmap(lambda key: choose(weights, 1, 1).sample(key, jnp.zeros(4))[0].ids[0])(jax.random.split(KEY, 4000))
    np.testing.assert_allclose(np.bincount(ids, minlength=4) / 4000, weights / 10, atol=0.04)  # 5 standard deviations
    with refused("aggregator", rule="no weights", hint="equal_chances"):
        algorithms.fedavg(population.quadratic_loss, choose(weights, 1, 1), optax.sgd(0.1), num_steps=1)


@pytest.mark.default_rows("2")
@pytest.mark.parametrize("lost", [None, 2])
def test_an_algorithm_that_is_no_star(skeletons, lost):
    """D-PSGD on a ring, in NumPy. Catches mixing of what has already moved, rows that a lost message moves up, bytes of
    what is not sent; on two devices, a mean or a mixture that is rounded otherwise."""
    size, rate, rng = 24, 0.3, np.random.default_rng(2)
    centers, curvatures = rng.normal(size=size).astype(np.float32), rng.uniform(0.5, 2, size)
    ring = np.stack([(np.arange(size) + shift) % size for shift in (0, -1, 1)])
    shares = np.repeat([[0.5], [0.25], [0.25]], size, axis=1)
    clients, start = population.quadratic_population(curvatures, centers), {"w": jnp.zeros(1)}

    def loss(params, examples, key):
        there = 1.0 if lost is None else jnp.where(examples["center"][:, 0] == centers[lost], jnp.inf, 1.0)
        return population.quadratic_loss(params, examples)["loss"] * there

    found, records = [], []
    for mesh in (None, engine.device_mesh(2)):
        made = skeletons["dpsgd"](loss, rate, ring, shares, mesh=mesh)
        judge = metrics.evaluation(population.quadratic_loss, local_test=clients, personal=made.evaluated.personal)
        look = {"evaluation": judge, "evaluate_every": 4} if mesh is None else {}
        state, history = run(KEY, made, start, clients, 4, **look)
        records.append(history.records[-1])
        own, mean = jax.jit(lambda state, made=made: (made.evaluated.personal(state, jnp.arange(size)),
                                                      made.params(state)))(state)  # fmt: skip
        found.append((np.asarray(own["w"]), np.asarray(mean["w"])))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    x, active = np.zeros(size), np.arange(size) != lost
    for _ in range(4):
        x = (shares * x[ring]).sum(0) - np.where(active, rate * curvatures * (x - centers), 0)
    np.testing.assert_allclose(found[0][0][:, 0], x, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[0][1], [x.mean()], rtol=1e-4)
    record, split = records
    assert record["uplink_bytes"] == 2 * size * 4 and record["dropped_clients"] == (lost is not None)
    assert all(record[name] == value for name, value in split.items())
    np.testing.assert_allclose(record["personal_loss"], (curvatures * (x - centers) ** 2 / 2).mean(), rtol=1e-4)


@pytest.mark.full  # by default other skeletons, and the library's own studies
def test_the_study(skeletons):
    """Catches a study whose theory misses, that draws nothing, or that fails what every study must do."""
    found = skeletons["step_size"](step_sizes=[0.3])
    assert [row["holds"] for row in found.rows()] == [True] and found.draw().axes
    with pytest.raises(TypeError, match="step_sizes: expected a list"):
        skeletons["step_size"](step_sizes=3)
