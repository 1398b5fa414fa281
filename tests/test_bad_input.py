"""Wrong input of every kind is refused in the format of `validate`, with its path, before anything compiles."""

import json

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import (
    aggregation,
    algorithms,
    client,
    metrics,
    models,
    network,
    population,
    sampling,
    server,
    transform,
)
from fedjax_sim.client import optimizers
from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.engine import Plan, fast_arithmetic
from fedjax_sim.running.loop import run
from fedjax_sim.types import ClientData

COMPILED = []
PLACING = {"jit(convert_element_type)", "jit(diff)", "jit(stage)"}  # data on their way to a device: milliseconds


def _listen(event, seconds, fun_name="?", **_):
    if event.endswith("backend_compile_duration") and fun_name not in PLACING:
        COMPILED.append(fun_name)


jax.monitoring.register_event_duration_secs_listener(_listen)
SMALL = ["data.num_clients=40", "data.held_out_clients=0", "sampler.cohort_size=10"]
ROWS = {"x": np.ones((3, 2)), "y": np.array([0, 1, 1])}


@pytest.fixture(autouse=True)
def nothing_compiles():
    """Fault: an error that comes only after seconds of compilation."""
    before = len(COMPILED)
    yield
    assert not COMPILED[before:]


def refused(words, error, call, *arguments, **options):
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    text = str(caught.value)
    for word in words.split(" | "):
        assert word in text, text


# what a value, a key or a table of a config can have wrong
WRONG_VALUES = {
    "text for a number": ("sampler.cohort_size=many", "sampler.cohort_size: expected an integer, got 'many'."),
    "number in quotes": ('run.rounds="5"', "run.rounds: expected an integer in [1, | got '5'. Leave out the quotes."),
    "bool for int": ("sampler.cohort_size=true", "sampler.cohort_size: expected an integer, got True."),
    "bool for rounds": ("run.rounds=false", "run.rounds: expected an integer | got False"),
    "bool for float": ("data.alpha=true", "data.alpha: expected a finite number, got True."),
    "int for bool": ("run.progress=1", "run.progress: expected true or false, got 1."),
    "float for int": ("sampler.cohort_size=10.0", "sampler.cohort_size: expected an integer, got 10.0."),
    "number for text": ("algorithm.weighting=3", 'algorithm.weighting: expected text or "none", got 3.'),
    "scalar for a list": ("model.hidden=64", "model.hidden: expected a list of integers, got 64."),
    "wrong item of a list": ("model.hidden=[64, true]", "model.hidden: expected a list of integers"),
    "NaN": ("data.alpha=nan", "data.alpha: expected a finite number, got nan."),
    "inf": (
        "client_optimizer.learning_rate=inf",
        "client_optimizer.learning_rate: expected a finite number > 0, got inf.",
    ),
    "minus inf": ("data.alpha=-inf", "data.alpha: expected a finite number, got -inf."),
    "rate past float32": (
        "client_optimizer.learning_rate=1e300",
        "client_optimizer.learning_rate: expected a finite number > 0, got 1e+300. float32 holds at most 3.4e+38.",
    ),
    "minus past float32": ("data.alpha=-1e39", "data.alpha: expected a finite number, got -1e+39. float32 holds"),
    "rate of minus nothing": ("client_optimizer.learning_rate=-0.0", "expected a finite number > 0, got -0.0."),
    "negative delta": ("run.delta=-0.5", 'run.delta: expected a number in (0, 1) or "none", got -0.5.'),
    "delta of one": ("run.delta=1.0", 'run.delta: expected a number in (0, 1) or "none", got 1.0.'),
    "zero rate": ("client_optimizer.learning_rate=0", "client_optimizer.learning_rate: expected a finite number > 0"),
    "negative rate": ("client_optimizer.learning_rate=-0.1", "expected a finite number > 0, got -0.1."),
    "momentum of one": ("client_optimizer.momentum=1.0", "client_optimizer.momentum: expected a number in [0, 1)"),
    "zero rounds": ("run.rounds=0", "run.rounds: expected an integer in [1, 2147483647], got 0."),
    "negative interval": ("run.evaluate_every=-1", "run.evaluate_every: expected an integer in [1, "),
    "too many rounds": ("run.rounds=2147483648", "run.rounds: expected an integer in [1, 2147483647], got 2147483648."),
    "too many lanes": ("run.lanes=65537", "run.lanes: expected an integer in [1, 65536]"),
    "no checkpoints kept": ("run.keep_checkpoints=0", "run.keep_checkpoints: expected an integer in [1, "),
    "negative seed": ("seed=-1", "seed: expected an integer in [0, 2147483647], got -1."),
    "seed past int32": ("seed=4294967296", "seed: expected an integer in [0, 2147483647]"),
    "table for a value": ("seed.x=1", "seed: expected an integer"),
    "value for a table": ("run=5", "run: expected a table, got 5."),
    "number for a table of a part": ("sampler=5", 'sampler: expected a table, got 5. Write sampler.name = "..."'),
    "name for a table": ("data=digits", "data: expected a table, got 'digits'. Write data.name = \"...\""),
    "unknown policy": ("run.nonfinite=dorp", 'run.nonfinite: expected one of "drop", "error" | Did you mean \'drop\'?'),
    "unknown devices": ("run.devices=gpu", 'run.devices: expected "all" or an integer'),
    "unknown table": ("sampling.cohort_size=3", "sampling: expected one of seed, data | Did you mean 'sampler'?"),
    "unknown option": ("sampler.cohort_sise=3", "the unknown key 'cohort_sise'. Did you mean 'cohort_size'?"),
    "unknown option of run": ("run.round=3", "run.round: expected one of rounds | Did you mean 'rounds'?"),
    "unknown wrapper": ("sampler.with_dropuot.rate=0.1", "Did you mean 'with_dropout'?"),
    "wrapper as sampler": ("sampler.name=with_dropout", "sampler.name: | write the table [sampler.with_dropout]"),
    "unknown data": ("data.name=digit", "data.name: expected one of | got 'digit'. Did you mean 'digits'?"),
    "unknown model": ("model.name=cnnn", "model.name: expected one of | Did you mean 'cnn'?"),
    "unknown algorithm": ("algorithm.name=fedavrg", "algorithm.name: | Did you mean 'fedavg'?"),
    "unknown optimiser": ("client_optimizer.name=adamm", "client_optimizer.name: | Did you mean 'adam'?"),
    "unknown aggregator": ("aggregator.name=maen", "aggregator.name: | Did you mean 'mean'?"),
    "no public factory": ("data.name=__import__", "data.name: expected one of"),
    "name that is no text": ("model.name=3", "model.name: expected one of"),
    "name that is a list": ("data.name=[1]", "data.name: expected one of | got [1]."),
    "name that is a table": ("algorithm.name={x=1}", "algorithm.name: expected one of | got {'x': 1}."),
    "option of another part": ("client_optimizer.first_decay=0.9", "client_optimizer.first_decay: expected one of"),
    "required option": (
        "data.name=shakespeare",
        "data.directory: expected the path of a folder, got nothing. | --set data.directory=",
    ),
    "both kinds of work": (
        "algorithm.num_steps=5 algorithm.num_epochs=1",
        "num_epochs: expected exactly one of the two, got (5, 1)",
    ),
    "no work": ("algorithm.num_steps=none", "num_epochs: expected exactly one of the two, got (None, None)"),
    "chunk without lanes": ("run.chunk=16", "run.chunk: expected run.lanes beside it, got 16."),
    "optimiser of a recipe without": (
        "algorithm.name=dgd client_optimizer.name=adam",
        "client_optimizer: expected no such table with dgd",
    ),
    "rate among the options of an algorithm": (
        "algorithm.name=scaffold algorithm.learning_rate=0.1",
        "algorithm.learning_rate: expected one of | Write client_optimizer.learning_rate.",
    ),
    "DP-SGD without its noise": (
        "algorithm.name=record_private_fedavg client_optimizer.name=sgd",
        "algorithm.clip_norm: expected a finite number, got nothing. | algorithm.noise_multiplier: expected",
    ),
    "epochs of DP-SGD": (
        "algorithm.name=record_private_fedavg algorithm.num_epochs=1",
        "the unknown key 'num_epochs'. Did you mean 'num_steps'?",
    ),
    "downlink by name": ("downlink.name=quantize", "downlink.name: expected one of | [downlink.NAME]."),
    "unknown downlink": ("downlink.quantise.bits=8", "downlink.quantise: | Did you mean 'quantize'?"),
    "downlink that wraps nothing": (
        "downlink.error_feedback={}",
        "downlink.error_feedback: expected a transform to wrap",
    ),
    "no clients": ("data.num_clients=0", "data.num_clients: expected an integer in [1, 2147483647], got 0."),
    "zero denominator": ("aggregator.name=fixed_mean aggregator.denominator=0.0", "aggregator.denominator: | got 0.0."),
    "bits of the way down": ("downlink.quantize.bits=17", "downlink.quantize.bits: expected an integer in [1, 16]"),
    "unknown schedule": ("client_optimizer.schedule=cosin", "client_optimizer.schedule: | Did you mean 'cosine'?"),
    "steps for fedsgd": ("algorithm.name=fedsgd algorithm.num_steps=5", "algorithm.num_steps: expected one of"),
    "set twice": ("run.rounds=5 run.rounds=6", "run.rounds: expected one --set | set twice"),
    "no equals sign": ("run.rounds", "--set: expected table.option=value, got 'run.rounds'."),
    "empty key": ("run..rounds=5", "--set: expected table.option=value"),
    "empty value": ("run.rounds=", "run.rounds: expected a TOML value, got ''."),
    "unfinished list": ("model.hidden=[64", "model.hidden: expected a TOML value, got '[64'."),
}


@pytest.mark.parametrize("overrides, words", WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_wrong_values(overrides, words):
    """Fault: a wrong value that is taken, or refused without saying where, why and what to do."""
    parts = overrides.split(" ") if "[" not in overrides else [overrides]
    refused(words, ConfigError, load, None, parts)


@pytest.mark.parametrize(
    "text, words",
    [
        ("[run]\nrounds = 5\nrounds = 6\n", "expected TOML, got Cannot overwrite a value (at line 3 | given once"),
        ("[run]\nrounds = 5\n[run]\nseed = 1\n", "Cannot declare ('run',) twice (at line 3 | given once"),
        ("[run\nrounds = 5\n", "expected TOML, got | line 1"),
        ("run = [1, 2]\n", "run: expected a table, got [1, 2]."),
        ("seed = 1979-05-27\n", "seed: expected an integer in [0, 2147483647], got datetime.date"),
        ("[data]\nname = 'digits'\nalpha = {x = 1}\n", "data.alpha: expected a finite number, got {'x': 1}."),
        ("[sampler]\nwith_dropout = 0.1\n", "sampler.with_dropout: expected a table, got 0.1."),
        ("x = " + "[" * 5000, "expected TOML, got"),
    ],
    ids=["duplicate key", "duplicate table", "broken", "list", "date", "inline table", "wrapper", "deep"],
)
def test_wrong_files(tmp_path, text, words):
    """Fault: a file that says two things, or half of one, and runs."""
    (tmp_path / "config.toml").write_text(text)
    refused(words, ConfigError, load, tmp_path / "config.toml")


def test_unreadable_files(tmp_path):
    """Fault: a traceback, or defaults, where a file cannot be read."""
    refused("nowhere.toml: expected a TOML file, got No such file", ConfigError, load, tmp_path / "nowhere.toml")
    refused("expected a TOML file, got It is a folder, and no regular file.", ConfigError, load, tmp_path)
    refused("Did you mean 'quickstart'?", ConfigError, load, "quikstart")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    refused("expected TOML, got 'utf-8' codec", ConfigError, load, tmp_path / "binary.toml")
    (tmp_path / "huge.toml").write_bytes(b"#" * (1 << 20) + b"\n")
    refused("got It has 1,048,577 bytes, and at most 1,048,576 are read.", ConfigError, load, tmp_path / "huge.toml")


# what the parts themselves refuse, with the path of the option
COMBINATIONS = {
    "cohort > population": (
        "sampler.cohort_size=41",
        "sampler.cohort_size: expected an integer in [1, 40], got 41. | with_replacement",
    ),
    "empty cohort": ("sampler.cohort_size=0", "sampler.cohort_size: expected an integer in [1, 40], got 0."),
    "huge cohort": ("sampler.name=cyclic sampler.cohort_size=99999999999", "sampler.cohort_size: | got 99999999999."),
    "rate above one": ("sampler.name=poisson sampler.rate=1.5", "sampler.rate: expected a number in (0, 1], got 1.5."),
    "slots > population": (
        "sampler.name=poisson sampler.rate=0.5 sampler.num_slots=41",
        "sampler.num_slots: | got 41.",
    ),
    "certain dropout": (
        "sampler.with_dropout.rate=1.0",
        "sampler.with_dropout.rate: expected a number in [0, 1), got 1.0.",
    ),
    "reports > cohort": (
        "sampler.with_over_invitation.num_reports=11",
        "sampler.with_over_invitation.num_reports: | got 11.",
    ),
    "negative alpha": ("data.alpha=-1.0", "data.alpha: expected a finite number > 0, got -1.0."),
    "sizes crossed": ("data.min_examples=30 data.max_examples=20", "examples: expected"),
    "test set of all": ("data.test_fraction=1.0", "data.test_fraction: expected"),
    "infeasible minimum": (
        "data.name=digits_partition data.num_clients=1500",
        "data.num_clients: expected at most the 1438 examples, got 1500. Each needs one.",
    ),
    "unknown partition": (
        "data.name=breast_cancer data.partition=dirichlett",
        "data.partition: | Did you mean 'dirichlet'?",
    ),
    "no folder": (
        "data.name=heart_disease data.directory=/no/where",
        "data.directory: expected an existing folder, got '/no/where'.",
    ),
    "model for texts": ("model.name=gru", "model.name: expected one of | got 'gru'. Its task is classification."),
    "images wanted": ("model.name=cnn", "input_shape"),
    "width of zero": ("model.hidden=[0]", "model.hidden"),
    "zero batch": ("algorithm.batch_size=0", "algorithm.batch_size: expected an integer in [1, 2147483647], got 0."),
    "negative proximity": (
        "algorithm.name=fedprox algorithm.coefficient=-1.0",
        "algorithm.coefficient: expected | got -1.0.",
    ),
    "rate of nothing": (
        "client_optimizer.learning_rate=1e-300",
        "client_optimizer.learning_rate: expected a finite number > 0, got 1e-300. float32 takes it for 0.",
    ),
    "steps past counting": (
        "algorithm.num_steps=2147483647",
        "algorithm.num_steps: expected an integer in [1, 16777216], got 2147483647.",
    ),
    "epochs past counting": (
        "algorithm.num_epochs=2147483647",
        "algorithm.num_epochs: expected an integer in [1, 16777216], got 2147483647.",
    ),
    "model past memory": ("model.hidden=[2000000000]", "model: expected at most | bytes, got '"),
    "unknown weighting": ("algorithm.weighting=example", "algorithm.weighting: | Did you mean 'examples'?"),
    "decay of one": (
        "algorithm.name=fedadam algorithm.first_decay=1.0",
        "algorithm.first_decay: expected a number in [0, 1)",
    ),
    "design with replacement": (
        "sampler.name=with_replacement aggregator.name=horvitz_thompson",
        "expected a design without replacement | li_scheme_one",
    ),
    "decay without schedule": (
        "client_optimizer.decay_steps=5",
        "client_optimizer.decay_steps: expected none with a constant schedule",
    ),
    "schedule without end": ("client_optimizer.schedule=cosine", "client_optimizer.decay_steps: expected an integer"),
    "nesterov without momentum": (
        "client_optimizer.nesterov=true",
        "client_optimizer.nesterov: expected false without momentum",
    ),
    "noise on the way down": (
        "downlink.gaussian_mechanism.clip_norm=1.0 downlink.gaussian_mechanism.noise_multiplier=1.0",
        "downlink: expected a compressor without noise, got 'gaussian'. Noise belongs to clients' ",
    ),
    "integers on the way down": (
        "downlink.quantize.bits=8 downlink.quantize.range=1.0 downlink.quantize.integers=true",
        "downlink: expected one that sends numbers, got 'integers in | integers=False",
    ),
    "noise at a plain mean": (
        "transform.gaussian_mechanism.clip_norm=1.0 transform.gaussian_mechanism.noise_multiplier=1.0",
        "aggregator: expected one whose result a client moves by a bounded amount | fixed_mean(m)",
    ),
    "fewer records than clients have": (
        "algorithm.name=record_private_fedavg algorithm.clip_norm=1.0 algorithm.noise_multiplier=1.0 "
        "algorithm.num_examples=30",
        "algorithm.num_examples: expected an integer in [60, 2147483647], got 30. The largest client has 60 rows.",
    ),
    "batch of more than all": (
        "algorithm.name=record_private_fedavg algorithm.clip_norm=1.0 algorithm.noise_multiplier=1.0 "
        "algorithm.batch_size=61",
        "algorithm.batch_size: expected an integer in [1, 60], got 61. At most num_examples",
    ),
    "second moments on the way down": (
        "algorithm.name=mime_lite algorithm.rule=adam downlink.quantize.bits=8",
        "downlink: expected none for adam, got 'a compressor'.",
    ),
    "counted twice by fedexp": (
        "algorithm.name=fedexp algorithm.weighting=examples sampler.name=weighted",
        "aggregator: expected one that takes no weights from clients | counts them twice | weighting='uniform'",
    ),
    "counted twice by mime": (
        "algorithm.name=mime_lite algorithm.weighting=examples sampler.name=weighted",
        "aggregator: expected one that takes no weights from clients | counts them twice | weighting='uniform'",
    ),
    "counted twice by a stretched mean": (
        "aggregator.name=extrapolated sampler.name=weighted",
        "aggregator: expected one that takes no weights from clients | counts them twice | weighting='uniform'",
    ),
    **{
        f"another optimiser than SGD for {name}": (
            f"algorithm.name={name} client_optimizer.name=adam {options}".strip(),
            f"optimizer: expected plain SGD for {name}, got 'one with a state",
        )
        for name, options in {
            "fednova": "",
            "mime": "",
            "mime_lite": "",
            "record_private_fedavg": "algorithm.clip_norm=1.0 algorithm.noise_multiplier=1.0",
            "scaffold": "",
        }.items()
    },
    "momentum for scaffold": (
        "algorithm.name=scaffold client_optimizer.momentum=0.9",
        "optimizer: expected plain SGD for scaffold, got 'one with a state | without momentum",
    ),
    "schedule for fednova": (
        "algorithm.name=fednova client_optimizer.schedule=cosine client_optimizer.decay_steps=9",
        "optimizer: expected plain SGD for fednova, got",
    ),
    "too many devices": ("run.devices=1000", 'run.devices: expected "all" or an integer in [1, | got 1000.'),
}


@pytest.mark.parametrize("overrides, words", COMBINATIONS.values(), ids=COMBINATIONS)
def test_wrong_combinations(overrides, words):
    """Fault: parts that do not fit, found after compiling, or told without the option's path."""
    overrides = overrides.split(" ")
    named = {text.partition("=")[0] for text in overrides}
    keeps = {"data.name=digits_partition", "data.name=breast_cancer"}
    small = [text for text in SMALL if text.partition("=")[0] not in named]
    if any(text.startswith("data.name") and text not in keeps for text in overrides):
        small = [text for text in small if not text.startswith("data.")]
    if "sampler.name=poisson" in overrides:
        small.remove("sampler.cohort_size=10")
    refused(words, ConfigError, build, load(None, [*overrides, *small]))


def sites(id="a", **changes):
    return population.from_sites({id: ROWS | changes}, {"a": ROWS}, task="binary", num_outputs=1, name="toy")


def broken_leaf(folder, text):
    for split in ("train", "test"):
        (folder / split).mkdir()
        (folder / split / "data.json").write_text(text)
    return population.leaf(directory=str(folder))


def leaf_json(**changes):
    whole = {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1.0]], "y": [0]}}}
    return json.dumps(whole | changes)


LOSS = models.supervised(models.linear(input_shape=(2,), num_outputs=1), models.default_loss("binary"))
CALLS = {
    "NaN feature": (ValueError, "a | expected a finite number, got nan", lambda _: sites(x=np.full((3, 2), np.nan))),
    "label out of range": (
        ValueError,
        "expected an integer label in [0, 1], got 2",
        lambda _: sites(y=np.array([0, 1, 2])),
    ),
    "lengths differ": (ValueError, "as many labels as examples, got (3, 2)", lambda _: sites(y=np.array([0, 1]))),
    "rows that are objects": (TypeError, "rows of equal length", lambda _: sites(x=np.array([None] * 3))),
    "id like a path": (ValueError, "that is no path, got '../a'", lambda _: sites(id="../a")),
    "nobody": (
        ValueError,
        "train: expected at least one client",
        lambda _: population.from_sites({}, {}, task="binary", num_outputs=1, name="toy"),
    ),
    "ids twice": (
        ValueError,
        "distinct",
        lambda folder: broken_leaf(folder, leaf_json(users=["a", "a"], num_samples=[1, 1])),
    ),
    "truncated JSON": (ValueError, "data.json", lambda folder: broken_leaf(folder, leaf_json()[:-9])),
    "huge claimed size": (ValueError, "data.json", lambda folder: broken_leaf(folder, leaf_json(num_samples=[10**9]))),
    "infeasible Dirichlet": (
        ValueError,
        "min_examples",
        lambda _: population.dirichlet(np.zeros(10, int), 5, 1.0, min_examples=3, seed=0),
    ),
    "Dirichlet of NaN": (
        ValueError,
        "alpha: expected a finite number > 0, got nan",
        lambda _: population.dirichlet(np.zeros(10, int), 5, float("nan"), seed=0),
    ),
    "bool population": (TypeError, "population_size: expected an integer", lambda _: sampling.uniform(True, 1)),
    "population past int32": (ValueError, "population_size", lambda _: sampling.uniform(2**31, 1)),
    "negative weights": (
        ValueError,
        "weights[1]: expected a finite number >= 0, got -1.0",
        lambda _: sampling.weighted([1, -1], 2),
    ),
    "weights of zero": (ValueError, "At least one client must have", lambda _: sampling.weighted([0, 0], 2)),
    "zero clip of weighting": (ValueError, "weighting: expected one of", lambda _: aggregation.mean(weighting="sizes")),
    "infinite denominator": (
        ValueError,
        "denominator: expected a finite number > 0, got inf",
        lambda _: aggregation.fixed_mean(float("inf")),
    ),
    "steps and epochs": (
        ValueError,
        "exactly one of the two, got (1, 1)",
        lambda _: client.local_sgd(LOSS, optax.sgd(0.1), client.work(num_steps=1, num_epochs=1)),
    ),
    **{
        f"another aggregator for {name}": (
            TypeError,
            f"{name}: expected one of its arguments, got 'aggregator'",
            lambda _, name=name: getattr(algorithms, name)(
                LOSS, sampling.full(4), optax.sgd(0.1), num_steps=2, weighting="uniform", aggregator=aggregation.mean()
            ),
        )
        for name in ("feddyn", "fedexp", "mime", "mime_lite", "scaffold")
    },
    "fractional steps": (
        TypeError,
        "num_steps: expected an integer",
        lambda _: client.local_sgd(LOSS, optax.sgd(0.1), client.work(num_steps=1.5)),
    ),
    "part not called": (
        TypeError,
        "sampler: expected a Sampler, got 'function'. Call the factory.",
        lambda _: algorithms.fedavg(LOSS, sampling.uniform, optax.sgd(0.1), num_steps=1),
    ),
    "unknown rule": (ValueError, "rule: expected one of", lambda _: server.adaptive("adamax", 0.1)),
    "rate as text": (
        TypeError,
        "learning_rate: expected a finite number > 0, got '0.1'",
        lambda _: optimizers.sgd(learning_rate="0.1"),
    ),
    "lanes of zero": (ValueError, "lanes: expected an integer in [1, 65536], got 0", lambda _: Plan.checked(0)),
    "unknown task": (ValueError, "task: expected one of", lambda _: models.default_loss("ranking")),
    "negative rounds": (
        ValueError,
        "num_rounds: expected an integer in [0, ",
        lambda _: run(None, None, None, None, -1),
    ),
    "resume from nowhere": (
        ValueError,
        "directory: expected the run directory to resume",
        lambda _: run(None, None, None, None, 1, resume=True),
    ),
}


LINEAR, EVERYBODY = models.linear(input_shape=(2,), num_outputs=1), sampling.full(4)
MODEL = "loss_fn: expected a function (params, examples, key), got Model(init= | supervised(model, loss)"
UNCALLED = "expected an optax transformation, got <function sgd | Call its factory"
CALLS |= {  # behaviour that is none
    "model as loss": (TypeError, MODEL, lambda _: algorithms.fedavg(LINEAR, EVERYBODY, optax.sgd(0.1), num_steps=1)),
    "model as loss of fedsgd": (TypeError, MODEL, lambda _: algorithms.fedsgd(LINEAR, EVERYBODY, optax.sgd(0.1))),
    "model as loss of a gradient": (TypeError, MODEL, lambda _: client.full_gradient(LINEAR)),
    "model as loss of mime": (
        TypeError,
        MODEL,
        lambda _: algorithms.mime(LINEAR, EVERYBODY, optax.sgd(0.1), num_steps=1, weighting="uniform"),
    ),
    "model as loss of DP-SGD": (
        TypeError,
        MODEL,
        lambda _: algorithms.record_private_fedavg(LINEAR, EVERYBODY, optax.sgd(0.1), num_examples=3, **PRIVATE),
    ),
    "model as loss of an evaluation": (TypeError, MODEL, lambda _: metrics.evaluation(LINEAR, test=ROWS)),
    "loss without a key": (
        TypeError,
        "loss_fn: expected a function (params, examples, key), got <function",
        lambda _: client.local_sgd(lambda params, examples: 0.0, optax.sgd(0.1), client.work(num_steps=1)),
    ),
    "loss not called": (
        TypeError,
        "loss: expected a function (outputs, targets), got <function default_loss",
        lambda _: models.supervised(LINEAR, models.default_loss),
    ),
    "model not called": (
        TypeError,
        "model: expected a Model, got 'function'.",
        lambda _: models.supervised(models.linear, models.squared_error),
    ),
    "optimiser not called": (
        TypeError,
        f"optimizer: {UNCALLED}",
        lambda _: algorithms.fedavg(LOSS, EVERYBODY, optax.sgd, num_steps=1),
    ),
    "rate as optimiser": (
        TypeError,
        "optimizer: expected an optax transformation, got 0.1.",
        lambda _: algorithms.feddyn(LOSS, EVERYBODY, 0.1, num_steps=1, weighting="uniform"),
    ),
    "server's optimiser not called": (
        TypeError,
        f"server.optimizer: {UNCALLED}",
        lambda _: algorithms.fedavg(LOSS, EVERYBODY, optax.sgd(0.1), num_steps=1, server_optimizer=optax.sgd),
    ),
    "steps past counting of DP-SGD": (
        ValueError,
        "num_steps: expected an integer in [1, 16777216], got 2147483647.",
        lambda _: algorithms.record_private_fedavg(
            LOSS, EVERYBODY, optax.sgd(0.1), num_examples=3, **PRIVATE | {"num_steps": 2**31 - 1}
        ),
    ),
    "epochs past counting of one client": (
        ValueError,
        "num_epochs: expected at most 16777216 steps, got 50331648.",
        lambda _: jax.eval_shape(
            client.local_sgd(
                population.quadratic_loss, optax.sgd(0.1), client.work(num_epochs=2**24, batch_size=1)
            ).apply,
            jax.eval_shape(lambda: jax.random.key(0)),
            {"w": np.zeros(1)},
            (),
            ClientData({"hessian": np.ones((3, 1, 1)), "center": np.ones((3, 1))}, np.ones(3, bool)),
        ),
    ),
}
PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 1.0, "num_steps": 1, "batch_size": 2}
CALLS |= {  # numbers that are none, or none that fit
    f"rate {rate!r}": (error, f"learning_rate: expected a finite number > 0, got {rate!r}", call)
    for rate, error in ((np.float64(1e39), ValueError), (1e-46, ValueError), (b"0.1", TypeError), (0.1j, TypeError))
    for call in [lambda _, rate=rate: optimizers.sgd(learning_rate=rate)]
}
CALLS |= {
    "short integer": (
        TypeError,
        "bits: expected an integer in [1, 16], got np.uint8(8). | int(",
        lambda _: transform.quantize(np.uint8(8)),
    ),
    "complex features": (TypeError, ".x: expected numbers | got 'complex128'", lambda _: sites(x=ROWS["x"] * 1j)),
    "complex labels": (TypeError, ".y: expected numbers | got 'complex128'", lambda _: sites(y=ROWS["y"] * 1j)),
    "spans of time": (TypeError, "got 'timedelta64[s]'", lambda _: sites(x=np.zeros((3, 2), "m8[s]"))),
    "bytes": (TypeError, ".x: expected numbers | got '|S1'", lambda _: sites(x=np.full((3, 2), b"1"))),
    "complex table": (
        TypeError,
        "examples['x']: expected an array of bool, integer or float, got 'complex128'",
        lambda _: population.stored({"x": ROWS["x"] * 1j}, [0, 3]),
    ),
    "complex Hessians": (
        TypeError,
        "hessians, centers: expected real numbers, got 'complex128'",
        lambda _: population.quadratic_population([1j], [0.0]),
    ),
    "text for Hessians": (
        TypeError,
        "hessians, centers: expected real numbers, got '<U1'",
        lambda _: population.quadratic_population(["a"], [0.0]),
    ),
    "copies past int32": (
        ValueError,
        "counts: expected 2147483647 rows at most, got 1099511627777",
        lambda _: population.quadratic_population([1.0] * 2, [0.0] * 2, counts=[1, 2**40]),
    ),
}


def table(folder, cell="1", name="b.csv", make=None):
    """A folder of two sites; the second one as given."""
    (folder / "a.csv").write_text("x,y\n1,0\n2,1\n3,0\n4,1\n")
    if make is None:
        (folder / name).write_text(f"x,y\n{cell},0\n2,1\n3,0\n4,1\n")
    else:
        make(folder / name)
    return population.csv_sites(directory=str(folder), label="y")


def fedavg(**options):
    return algorithms.fedavg(LOSS, sampling.uniform(4, 2), optax.sgd(0.1), num_steps=1, **options)


def gossip(**options):
    mixing = network.metropolis(network.ring(4))
    return algorithms.dpsgd(LOSS, mixing, optax.sgd(0.1), num_steps=1, **options)


NUMBERS = ("1_0", "\u0661", "\uff11", "0x10", "1e", "inf", "nan", "1d3", "true", "--1", "1e400")
CALLS |= {
    f"cell {cell!r}": (ValueError, f"b.csv:2: expected | got {cell!r}", lambda folder, cell=cell: table(folder, cell))
    for cell in NUMBERS
} | {
    f"site named {name}": (
        ValueError,
        f"{name}: expected a site's table as a file NAME.csv",
        lambda folder, name=name: table(folder, name=name),
    )
    for name in ("b.CSV", "b.Csv", "b.csv.gz", "b.csv.ZIP", "a.CSV")
} | {
    "site that leads nowhere": (
        ValueError,
        "b.csv: expected a site's table as a file NAME.csv",
        lambda folder: table(folder, make=lambda path: path.symlink_to("nowhere")),
    ),
    "site that is a folder": (
        ValueError,
        "b.csv: expected a site's table as a file NAME.csv",
        lambda folder: table(folder, make=lambda path: path.mkdir()),
    ),
    "plan that is a number": (TypeError, "plan: expected a Plan or None, got 3", lambda _: fedavg(plan=3)),
    "mesh of another word": (TypeError, "mesh: expected 'all', None or a Mesh, got 'al'", lambda _: fedavg(mesh="al")),
    "plan of gossip that is a number": (TypeError, "plan: expected a Plan or None, got 3", lambda _: gossip(plan=3)),
    "mesh of gossip of another word": (TypeError, "mesh: expected 'all', None", lambda _: gossip(mesh="al")),
    "arithmetic by its word": (
        TypeError,
        "is_on: expected True or False, got 'reproducible'",
        lambda _: fast_arithmetic("reproducible").__enter__(),
    ),
    "JSON that leads nowhere": (
        ValueError,
        "more.JSON: expected a file NAME.json",
        lambda folder: [(folder / "train").mkdir(), (folder / "train" / "more.JSON").symlink_to("nowhere"),
                        (folder / "test").mkdir(), (folder / "train" / "data.json").write_text(leaf_json()),
                        population.leaf(directory=str(folder))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("error, words, call", CALLS.values(), ids=CALLS)
def test_wrong_calls(tmp_path, error, words, call):
    """Fault: a library call that takes broken data or impossible numbers."""
    refused(words, error, call, tmp_path)


def test_there_are_at_least_sixty():
    """Fault: a shrinking list."""
    assert len(WRONG_VALUES) + len(COMBINATIONS) + len(CALLS) >= 60
