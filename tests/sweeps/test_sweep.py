"""Sweeps: every point is the single run, bit for bit; kills, wrong input, statistics."""

from __future__ import annotations

import contextlib
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_sim import aggregation, algorithms, engine, metrics, models, population, sampling, transform
from fedjax_sim.running.checkpoint import CheckpointError
from fedjax_sim.running.loop import run
from fedjax_sim.sweeps import traced_hyperparameters
from fedjax_sim.sweeps.finished import Finished
from fedjax_sim.sweeps.points import Points, traced
from fedjax_sim.sweeps.results import Sweep
from fedjax_sim.sweeps.sweep import sweep
from tests.refusals import refused

pytestmark = pytest.mark.optimised

COLUMNS = "seed,rate,steps,round,local_loss,dropped_clients_so_far,skipped_rounds_so_far"
QUADRATICS = population.quadratics(num_clients=8, dimension=3)
POINT = {"w": jnp.zeros(3)}


def quadratic(rate, steps=2, **options):
    work = {"num_steps": steps} | options
    client = rate if isinstance(rate, optax.GradientTransformation) else optax.sgd(rate)
    return algorithms.fedavg(population.quadratic_loss, sampling.uniform(8, 4), client, **work)


def adaptive(rate):
    """Floats that are rounded, squared and taken from one before a program sees them."""
    return algorithms.fedadam(
        population.quadratic_loss, sampling.uniform(8, 4), optax.sgd(rate), num_steps=2,
        second_decay=1 - rate / 7, adaptivity=rate / 30, server_learning_rate=rate / 3,
    )  # fmt: skip


def scheduled(rate):
    """Floats that end up in powers, and quotients by them."""
    power, exponent = (
        optax.polynomial_schedule(0.7, 0.01, 2 + rate, 7),
        optax.cosine_decay_schedule(1, 7, 0, 1 + rate),
    )
    return quadratic(optax.adam(power, b1=rate, b2=1 - rate / 7), 4, server_optimizer=optax.sgd(exponent))


def case(name):
    """(make, params, population, evaluation) of a model."""
    if name in ("quadratic", "scheduled"):
        judge = metrics.evaluation(population.quadratic_loss, test=QUADRATICS.test)
        return (
            adaptive if name == "quadratic" else scheduled,
            lambda key: {"w": jax.random.normal(key, (3,))},
            QUADRATICS.train,
            judge,
        )
    data = population.digits(num_clients=30)
    model = models.linear if name == "logistic" else models.mlp
    options = {"hidden": (12,)} if name == "mlp" else {}
    model = model(input_shape=data.input_shape, num_outputs=data.num_outputs, **options)
    loss_fn = models.supervised(model, models.default_loss(data.task))

    def make(rate):
        noise = transform.chain(transform.quantize(8), transform.gaussian_mechanism(2 * rate, 0.1 + rate))
        table = {"transform": noise, "aggregator": aggregation.fixed_mean(6.0)} if name == "logistic" else {}
        return algorithms.fedprox(
            loss_fn, sampling.uniform(30, 6), optax.sgd(rate, momentum=0.5 + rate), num_steps=3, batch_size=4,
            coefficient=rate, weighting="uniform", **table,
        )  # fmt: skip

    return make, lambda key: model.init(key)[0], data.train, metrics.evaluation(loss_fn, test=data.test)


@pytest.mark.parametrize(
    "name", ["quadratic", *(pytest.param(name, marks=pytest.mark.full) for name in ("scheduled", "logistic", "mlp"))]
)
def test_a_sweep_is_single_runs(name):
    """Catches floats that a program rounds otherwise as arguments, other keys, stale evaluations, points mixed up."""
    make, params, people, evaluation = case(name)
    options = {"evaluation": evaluation, "evaluate_every": 3}
    rates = [0.1, 0.23] if name == "scheduled" else [0.1, 0.3, 0.23]  # a power stays in its program
    points = {"grid": {"rate": rates}, "seeds": [4, 9]}
    found = sweep(make, params, people, 7, **points, **options)
    assert (found.num_programs, found.exact, len(found.rows)) == (2 if name == "scheduled" else 1, True, 6 * len(rates))
    for rate, seed in [(0.23, 4), (0.1, 9)][: 2 if name == "mlp" else 1]:
        key = jax.random.key(seed)
        with engine.one_device() if name in ("quadratic", "logistic") else contextlib.nullcontext():
            _, history = run(key, make(rate), params(jax.random.fold_in(key, 2**31 - 1)), people, 7, **options)
        rows = [row for row in found.rows if (row["rate"], row["seed"]) == (rate, seed)]
        assert [row["round"] for row in rows] == [3, 6, 7]
        for row in rows:
            record = history.records[row["round"]]  # round 0 comes first
            assert {name: row[name] for name in record} == record  # shortest decimals: one for each float32
            for way in ("uplink_bytes", "downlink_bytes"):
                sent = sum(each[way] for each in history.records[1 : row["round"] + 1])
                assert row[f"{way}_so_far"] == sent > 0


@pytest.mark.full
def test_devices_and_batches_of_points():
    """Catches rows that follow the number of devices, and points of a batch that are mixed up."""
    make, params, people, evaluation = case("quadratic")
    options = {"grid": {"rate": [0.1, 0.3, 0.23]}, "seeds": [4, 9], "evaluation": evaluation, "evaluate_every": 3}
    found = sweep(make, params, people, 7, **options)
    with engine.one_device():
        assert sweep(make, params, people, 7, **options).rows == found.rows
    near = sweep(make, params, people, 7, batch=2, **options)
    assert not near.exact
    np.testing.assert_allclose(near.column("test_loss"), found.column("test_loss"), rtol=1e-5)


@pytest.mark.full
def test_points_have_own_models_and_evaluations():
    """APFL's own models mix with the share of their point. Catches points judged by another point's share or state."""
    data = population.with_local_test(population.synthetic_images(num_clients=6, examples_per_client=10))
    model = models.linear(input_shape=data.input_shape, num_outputs=data.num_outputs)
    loss_fn = models.supervised(model, models.default_loss(data.task))

    def make(share):
        return algorithms.apfl(loss_fn, sampling.uniform(6, 2), optax.sgd(0.1), share=share, num_steps=2)

    def evaluation_of(algorithm):
        evaluated = algorithm.evaluated
        options = {"personal": evaluated.personal, "has_trained": evaluated.has_trained}
        return metrics.evaluation(loss_fn, local_test=data.local_test, **options)

    start = model.init(jax.random.key(1))[0]
    options = {"grid": {"share": [0.2, 0.9]}, "seeds": [4, 9], "evaluation_of": evaluation_of, "evaluate_every": 2}
    for row in sweep(make, start, data.train, 3, **options).rows:
        algorithm, key = make(row["share"]), jax.random.key(row["seed"])
        judge = evaluation_of(algorithm)
        _, history = run(key, algorithm, start, data.train, 3, evaluation=judge, evaluate_every=2)
        record = history.records[row["round"]]
        assert {name: row[name] for name in record} == record and row["personal_clients"] < 6
    with refused("evaluation", rule="one of params"):
        sweep(make, start, data.train, 3, grid={"share": [0.2]}, evaluation=evaluation_of(make(0.2)))
    with refused("evaluation", rule="beside evaluation_of"):
        sweep(make, start, data.train, 3, grid={"share": [0.2]}, evaluation=len, evaluation_of=evaluation_of)


def test_what_differs_in_floats_shares_a_program():
    """Catches a float that makes a program of its own, and a shape that does not."""
    people = QUADRATICS.train

    def kinds(make, values):
        return len({traced(make(value), POINT, people).name for value in values})

    assert kinds(quadratic, [0.1, 2.0]) == 1
    assert kinds(lambda c: quadratic(0.1, transform=transform.clip(c)), [0.3, 7.0]) == 1
    assert kinds(lambda m: quadratic(0.1, server_optimizer=optax.sgd(m, momentum=m)), [0.3, 0.7]) == 1
    assert kinds(lambda k: quadratic(0.1, k), [1, 2]) == 2
    assert kinds(lambda m: quadratic(0.1, server_optimizer=optax.sgd(1.0, momentum=m)), [None, 0.5, 0.6]) == 2


def test_floats_are_lifted_out_of_everything():
    """Catches floats inside loops, branches, rules and constants that are left as the first value had them."""

    def make(a):
        @jax.custom_jvp
        def rule(x):
            return x * a

        rule.defjvp(lambda primals, tangents: (rule(*primals), tangents[0] * a))

        def function(x):
            x, rows = jax.lax.scan(lambda c, row: (c * a + row, c * 2.0), x, jnp.ones(3))
            x = jax.lax.while_loop(lambda c: c[0] < 9 * a, lambda c: (c[0] * (1 + a), c[1]), (x, 1))[0]
            x = jax.checkpoint(lambda z: jnp.sin(z) * a)(jax.jit(lambda z: z - a)(rule(x)))
            return jax.lax.cond(x > 1, lambda u: u * a, lambda u: u * (3.0 + a), x), rows, np.float32([a, 2 * a]) * x

        return function

    values, x = [0.3, 0.5, 0.7], jnp.float32(1)
    traces = [traced_hyperparameters.traced_program(make(a), x)[0] for a in values]
    assert len({one.kind for one in traces}) == 1
    floats = traced_hyperparameters.lifted(traces)
    again = jax.jit(lambda own, x: traced_hyperparameters.replay(traces[0], own, x))
    for i, a in enumerate(values):
        found = again([None if column is None else column[i] for column in floats], x)
        jax.tree.map(np.testing.assert_array_equal, found, jax.jit(make(a))(x))


@pytest.mark.full
def test_kill_and_resume(tmp_path):
    """Catches rows lost, doubled or changed by a kill, at whatever byte it fell."""
    options = {
        "grid": {"rate": [0.1, 0.2], "steps": [1, 2]},
        "seeds": 2,
        "evaluate_every": 2,
        "metrics": ["local_loss"],
    }
    whole = sweep(quadratic, POINT, QUADRATICS.train, 4, directory=tmp_path, **options)
    assert whole.num_programs == 2
    text = (tmp_path / "results.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == whole.rows
    assert (tmp_path / "results.csv").read_text().splitlines()[0] == COLUMNS
    file = tmp_path / "points.jsonl"
    full = file.read_bytes()
    file.write_bytes(full[: full.index(b'{"point": 6') + 9])
    (tmp_path / "results.jsonl").unlink()
    again = sweep(quadratic, POINT, QUADRATICS.train, 4, directory=tmp_path, resume=True, **options)
    assert again.rows == whole.rows and (tmp_path / "results.jsonl").read_text() == text
    assert sorted(file.read_bytes().splitlines()) == sorted(full.splitlines())


@pytest.mark.optimised(False)
def test_a_program_is_compiled_while_points_run(tmp_path, monkeypatch):
    """Faults: points that wait for the programs of others; points that are lost, or are not run, where the program of
    others cannot be compiled."""
    compile_points, run_points = Points.compile, Points.run
    first_runs = threading.Event()
    compiled = []

    def compile_then(program):
        compiled.append(program)
        if len(compiled) == 2:
            assert first_runs.wait(60)
            raise MemoryError("the second program")
        compile_points(program)

    def run_then(program, *args):
        first_runs.set()
        yield from run_points(program, *args)

    monkeypatch.setattr(Points, "compile", compile_then)
    monkeypatch.setattr(Points, "run", run_then)
    with pytest.raises(MemoryError, match="the second program"):
        sweep(
            lambda steps: quadratic(0.1, steps), POINT, QUADRATICS.train, 2, grid={"steps": [1, 2]}, directory=tmp_path
        )
    assert len((tmp_path / "points.jsonl").read_text().splitlines()) == 2  # the sweep's identity, and the first point


@pytest.mark.full
def test_what_diverged_is_told():
    """Catches a point whose clients' updates overflow, are left out, and leave no trace in its rows."""
    found = sweep(quadratic, POINT, QUADRATICS.train, 40, grid={"rate": [0.1, 1e4]}, metrics=["local_loss"])
    assert [row["rate"] for row in found.lossy()] == [1e4]
    assert found.lossy()[0]["skipped_rounds_so_far"] > 0


def test_any_cut_of_the_file_is_a_shorter_sweep(tmp_path):
    """Catches a torn line that is read, or that stays in front of the next one."""
    rows = {i: [{"seed": i, "loss": "nan"}] for i in range(3)}
    first = Finished(tmp_path, {"a": 1}, False)
    head = len(first.path.read_bytes())
    for i, row in rows.items():
        first.add({i: row})
    full = first.path.read_bytes()
    for cut in range(head, len(full) + 1):
        first.path.write_bytes(full[:cut])
        found = Finished(tmp_path, {"a": 1}, True)
        assert found.rows == {i: rows[i] for i in range(full[:cut].count(b"\n") - 1)}
        found.add({i: rows[i] for i in rows if i not in found.rows})
        assert first.path.read_bytes() == full


def test_another_sweep_is_refused(tmp_path):
    """Catches points of two sweeps in one file; a make that changed is another sweep though it has the same name."""
    Finished(tmp_path, {"rounds": 4, "programs": "x"}, False)
    with pytest.raises(CheckpointError, match="rounds: 4 in the file, 5 now"):
        Finished(tmp_path, {"rounds": 5, "programs": "x"}, True)
    with pytest.raises(FileExistsError, match="Resume it"):
        Finished(tmp_path, {"rounds": 4}, False)
    with pytest.raises(FileNotFoundError, match="Start without"):
        Finished(tmp_path / "none", {}, True)


@pytest.mark.optimised(False)
def test_a_sweep_resumes_itself_alone(tmp_path, monkeypatch):
    """Catches integers that a part closes over, evaluations, and sizes of the thread pool, on which last bits depend,
    that are changed in silence between two halves."""

    def make(table):
        def loss(params, example, key):
            return {"loss": population.quadratic_loss(params, example, key)["loss"] * jnp.asarray(table)[0]}

        return lambda rate: algorithms.fedavg(loss, sampling.uniform(8, 4), optax.sgd(rate), num_steps=1)

    def go(table, judge, resume=True):
        options = {"grid": {"rate": [0.1]}, "evaluation": lambda params: {"judge": judge}, "directory": tmp_path}
        return sweep(make(np.array([table])), POINT, QUADRATICS.train, 1, resume=resume, **options).rows

    rows = go(1, 1.0, resume=False)
    assert go(1, 1.0) == rows
    with pytest.raises(CheckpointError, match=r"another sweep:\n  programs: [^\n]*$"):
        go(5, 1.0)
    with pytest.raises(CheckpointError, match=r"sweep:\n  evaluation.judge: 1.0 in the file, 2.0 now$"):
        go(1, 2.0)
    monkeypatch.setenv("NPROC", "5")
    with pytest.raises(CheckpointError, match=r"sweep:\n  host_threads: 8 in the file, 5 now$"):
        go(1, 1.0)


def test_a_flipped_digit_is_refused(tmp_path):
    """Catches a damaged line that is read as what a point found."""
    first = Finished(tmp_path, {"a": 1}, False)
    first.add({0: [{"loss": 0.25}], 1: [{"loss": 0.75}]})
    full = first.path.read_bytes()
    for old, new, words in (
        (b"0.75", b"0.76", "line 3 is damaged. Take it out"),
        (b'"a": 1', b'"a": 2', "line 1 is damaged.$"),
    ):
        first.path.write_bytes(full.replace(old, new))
        with pytest.raises(CheckpointError, match=words):
            Finished(tmp_path, {"a": 1}, True)
    first.path.write_bytes(full + b"3\n")
    with pytest.raises(CheckpointError, match="lines of a sweep"):
        Finished(tmp_path, {"a": 1}, True)
    first.path.write_bytes(b"".join(full.splitlines(keepends=True)[:2]))
    assert Finished(tmp_path, {"a": 1}, True).rows == {0: [{"loss": 0.25}]}
    first.path.unlink()
    with pytest.raises(FileNotFoundError):  # deleted during the sweep: not begun anew, without its first line
        first.add({2: []})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grid": {"rat": [0.1]}, "make": lambda rate: quadratic(rate)}, "Did you mean 'rate'"),
        ({"grid": {"rate": []}}, "grid.rate: expected a value at least"),
        ({"grid": {"rate": [0.1, float("nan")]}}, r"grid.rate\[1\]: expected a finite number"),
        ({"grid": {"rate": np.array([0.1, 0.1])}}, "each once"),
        ({"grid": {"rate": [1, 1.0]}}, "each once"),
        ({"grid": [{"rate": 1}, {"rate": True}]}, "grid: expected each once"),
        ({"grid": [{"rate": 1, "steps": 1}, {"rate": True, "steps": 2}]}, "grid.rate: expected each once"),
        ({"grid": {"rate": 0.1}}, "Put it into a list"),
        ({"grid": {"steps": [1]}}, "values for rate"),
        ({"grid": {"rate": [0.1], "seed": [1]}}, "names that rows do not use"),
        ({"grid": [{"rate": 0.1}, {"steps": 1}]}, r"grid\[1\]: expected the names of the first"),
        ({"grid": {"rate": range(1, 2000), "steps": range(2000)}}, "at most"),
        ({"grid": {"rate": [optax.sgd]}}, "Choose by name"),
        (
            {"grid": {"rate": [0.1], "local_loss": [1.0]}, "make": lambda rate, local_loss: quadratic(rate)},
            "names that no metric has",
        ),
        ({"seeds": 0}, "seeds: expected an integer"),
        ({"seeds": [1, 1]}, "For more trials give more seeds"),
        ({"seeds": [-1]}, r"seeds\[0\]"),
        ({"batch": 0}, "batch"),
        ({"num_rounds": 0}, "num_rounds"),
        ({"resume": True}, "directory"),
        ({"metrics": ["local_los"]}, "Did you mean 'local_loss'"),
        ({"evaluation": lambda params: {"local_loss": 1.0}}, "Put a prefix"),
        ({"make": lambda rate: quadratic(rate, nonfinite="error")}, "goes on past non-finite"),
        ({"make": lambda rate: 3}, "expected an Algorithm"),
    ],
)
def test_wrong_input(change, words, monkeypatch):
    """Catches input that is passed over in silence."""
    options = {"make": quadratic, "grid": {"rate": [0.1]}, "num_rounds": 1} | change
    make, num_rounds = options.pop("make"), options.pop("num_rounds")
    with pytest.raises((TypeError, ValueError), match=words):
        sweep(make, POINT, QUADRATICS.train, num_rounds, **options)


def test_a_point_that_cannot_be_traced_is_named():
    """Catches an error of one combination among many that does not say which one it is."""

    def make(steps):
        if steps < 2:
            return quadratic(0.1)
        algorithm = quadratic(0.1)
        return algorithm._replace(step=lambda key, state, population: jnp.ones(2) @ jnp.ones(3))

    with pytest.raises(TypeError) as caught:
        sweep(make, POINT, QUADRATICS.train, 1, grid={"steps": [1, 2]})
    assert any("{'steps': 2}" in note for note in caught.value.__notes__)


def of_values(table, name="loss"):
    """A sweep of one round from {(rate, seed): value}."""
    rows = [{"seed": seed, "rate": rate, "round": 1, name: value} for (rate, seed), value in table.items()]
    return Sweep(rows, ("rate",), sorted({seed for _, seed in table}), 1, True)


def test_summary_and_pairs():
    """Catches intervals of the wrong width, pairs that are not pairs, diverged points that vanish."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=12)
    a, b = common + 0.1 * rng.normal(size=12), common + 0.3 + 0.1 * rng.normal(size=12)
    found = of_values({(rate, s): float(x[s]) for rate, x in ((1.0, a), (2.0, b)) for s in range(12)})
    cell = found.summary("loss", confidence=0.9)[1]
    low, high = stats.t.interval(0.9, 11, b.mean(), stats.sem(b))
    np.testing.assert_allclose([cell["low"], cell["high"]], [low, high])
    pair, test = found.paired("loss", "rate", 1.0, 2.0), stats.ttest_rel(a, b)
    np.testing.assert_allclose([pair.difference, pair.p_value], [(a - b).mean(), test.pvalue])
    np.testing.assert_allclose([pair.low, pair.high], list(test.confidence_interval(0.95)))
    assert pair.correlation > 0.9
    rows = [
        {"seed": s, "rate": r, "b": b, "round": 1, "loss": float(s + 9 * b)}
        for r in (1, 2)
        for b in (0, 1)
        for s in (0, 1)
    ]
    (cell, _) = Sweep(rows, ("rate", "b"), [0, 1], 1, True).summary("loss", by="rate")  # seeds alone are independent
    assert (cell["seeds"], cell["mean"], cell["standard_error"]) == (2, 5.0, 0.5)
    lost = of_values({(1.0, 0): 1.0, (1.0, 1): "nan", (2.0, 0): "inf", (2.0, 1): 4.0, (2.0, 2): 2.0, (1.0, 2): 5.0})
    first, second = lost.summary("loss")
    assert (first["seeds"], first["diverged"], second["diverged"]) == (3, 1, 1) and np.isnan(first["mean"])
    assert [cell["mean"] for cell in lost.summary("loss", finite_only=True)] == [3.0, 3.0]
    pair = lost.paired("loss", "rate", 1.0, 2.0)
    assert (pair.difference, pair.seeds, pair.diverged) == (3.0, 1, 2) and np.isnan(pair.low)
    with pytest.raises(ValueError, match="two different"):
        lost.paired("loss", "rate", 1.0, 1.0)
    with pytest.raises(ValueError, match="Did you mean 'loss'"):
        lost.summary("los")
    rows = [
        {"seed": s, "rate": rate, "steps": steps, "round": 1, "loss": 10.0 * steps + s + rate * s}
        for rate, steps in ((1, 1), (1, 5), (2, 1), (3, 4)) for s in range(3)
    ]  # fmt: skip
    found = Sweep(rows, ("rate", "steps"), [0, 1, 2], 1, True)
    assert found.paired("loss", "rate", 2, 1).difference == 1.0  # of the pairs, steps = 1 alone
    with pytest.raises(ValueError, match="occur with the same values"):
        found.paired("loss", "rate", 1, 3)
    with pytest.raises(ValueError, match="all occur with the same values"):
        found.summary("loss", by="rate")
    draws = rng.normal(size=(400, 4))  # 95 % of 400: 380, standard deviation 4.4
    cells = [of_values({(1.0, s): float(x) for s, x in enumerate(row)}).summary("loss")[0] for row in draws]
    assert 362 <= sum(cell["low"] < 0 < cell["high"] for cell in cells) <= 396
    assert sum(cell["low"] < 1 < cell["high"] for cell in cells) < 362


def test_differences_are_paired():
    """Catches a difference of two means in place of a mean of differences, another sign, another reference."""
    rng = np.random.default_rng(1)
    common = rng.normal(size=8)
    columns = [common, common + 0.1 + 0.01 * rng.normal(size=8), common - 0.3 + 0.01 * rng.normal(size=8)]
    columns[2][5] = np.inf
    values = zip((2.0, 0.5, 1.0), columns, strict=True)
    found = of_values({(rate, s): float(x[s]) for rate, x in values for s in range(8)})
    near, lost = found.differences("loss", confidence=0.9)
    test = stats.ttest_rel(columns[1], columns[0])
    expected = [0.5, (columns[1] - columns[0]).mean(), test.pvalue, *test.confidence_interval(0.9)]
    np.testing.assert_allclose([near[x] for x in ("rate", "difference", "p_value", "low", "high")], expected)
    assert near["high"] - near["low"] < 0.1 < np.ptp(common) and near["correlation"] > 0.9
    assert (lost["rate"], lost["seeds"], lost["diverged"]) == (1.0, 7, 1)
    assert of_values({(2.0, 0): 1.0}).differences("loss") == []
    # Over other data nothing is paired: the first rate of each alpha is the reference of its other rates.
    rows = [
        {"seed": s, "rate": rate, "data.alpha": alpha, "round": 1, "loss": 100 * alpha + rate + s}
        for rate in (2.0, 0.5) for alpha in (1.0, 3.0) for s in range(2)
    ]  # fmt: skip
    apart = Sweep(rows, ("rate", "data.alpha"), [0, 1], 2, True, apart=("data.alpha",))
    assert [x and x["difference"] for x in apart.difference_of_each("loss")] == [None, None, -1.5, -1.5]
    assert [(x["rate"], x["data.alpha"]) for x in apart.differences("loss")] == [(0.5, 1.0), (0.5, 3.0)]
