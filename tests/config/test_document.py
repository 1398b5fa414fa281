"""The config: what it reads, fills in and writes, and that it needs no JAX to refuse."""

import importlib
import inspect
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from fedjax_sim import algorithms, transform
from fedjax_sim.config import registry
from fedjax_sim.config.build import Builder, build
from fedjax_sim.config.document import Config, ConfigError, load
from fedjax_sim.config.signatures import TABLES
from fedjax_sim.transform.chain import wire_of
from tests.aggregation.robust.problems import applied
from tests.laws import cases

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CHAIN = ["transform.error_feedback.top_k.share=0.1", "transform.quantize.bits=4", "data.num_clients=50"]
DOWN = [text.replace("transform", "downlink") for text in CHAIN]
SMALL = ["data.num_clients=40", "data.held_out_clients=3", "sampler.cohort_size=10", "model.hidden=[4]"]
SMALL += ["run.devices=1"]
IDS, KEY = np.arange(10, dtype=np.int32), jax.random.key(0)


class Made(Exception):
    """Carries an algorithm out of its builder."""


class PartsAlone(Builder):
    """A builder that ends where the algorithm is made: it fits no plan, and no model starts."""

    def fitted(self, algorithm, spec, population, mesh):
        raise Made(algorithm, spec, population)


def algorithm_of(config: Config, **parts) -> tuple:
    """The algorithm that a config describes, the shapes of its model and its clients; any part may have refused."""
    builder = PartsAlone(config)
    builder.parts |= parts
    with pytest.raises(Made) as made:
        builder.experiment()
    return made.value.args


def told(algorithm, spec, people) -> dict:
    """The shapes of what a round tells."""
    state = jax.eval_shape(algorithm.init, KEY, spec, people)
    return jax.eval_shape(algorithm.step, KEY, state, people)[1]


def test_the_main_job_is_the_default():
    """Fault: a quickstart file, or a default, that is no longer the default run."""
    main = load().resolved()
    assert main["data"] == {"name": "digits", "num_clients": 100_000, "alpha": 0.3, "min_examples": 20} | {
        "max_examples": 60,
        "test_fraction": 0.2,
        "held_out_clients": 200,
        "flat": True,
    }
    assert main["model"] == {"name": "mlp", "hidden": [128]}
    assert main["sampler"] == {"name": "uniform", "cohort_size": 1000}
    assert main["algorithm"]["num_steps"] == 5 and main["algorithm"]["batch_size"] == 10
    assert main["client_optimizer"]["learning_rate"] == 0.5
    assert (main["run"]["rounds"], main["run"]["evaluate_every"], main["seed"]) == (100, 10, 0)
    assert load(EXPERIMENTS / "quickstart.toml") == load()


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda path: path.stem)
def test_experiments_load(path):
    """Fault: a file in experiments/ with an option that is gone, or a data folder of somebody's machine in it."""
    data = tomllib.loads(path.read_text())["data"]
    assert "directory" not in data
    needs_files = "directory" in registry.parts_of_table("data")[data["name"]].options
    load(path, ["data.directory=somewhere"] if needs_files else [])


@pytest.mark.default_rows("record_private")
@pytest.mark.parametrize("name", ["compressed_private", "federated_graph", "record_private", "social_graph"])
def test_private_experiments_build(name):
    """Fault: parts of an experiment that a config may hold, but that refuse each other; a model that SplitGNN is not
    handed."""
    few = ["data.num_clients=50"] if name == "compressed_private" else []
    experiment = build(load(EXPERIMENTS / f"{name}.toml", few))
    state = jax.eval_shape(experiment.algorithm.init, experiment.key, experiment.params, experiment.data.train)
    jax.eval_shape(experiment.algorithm.step, experiment.key, state, experiment.data.train)


ROUND_TRIPS = [
    [],
    ["algorithm.num_epochs=2"],
    ["algorithm.batch_size=none", "run.checkpoint_every=7", "run.devices=1", "run.lanes=4", "run.chunk=8"],
    ["sampler.with_dropout.rate=0.1", "sampler.with_over_invitation.num_reports=900", "client_optimizer.momentum=0.9"],
    ["algorithm.name=fednova", "client_optimizer.learning_rate=1e-05", "model.hidden=[]", "seed=7", "data.seed=3"],
    ["algorithm.name=fedsgd", "aggregator.name=fixed_mean", "aggregator.denominator=1000"],
    [
        "data.name=csv_sites",
        'data.directory="a \\"b\\" \\\\ \\u007f\\n[run]"',
        "data.label=größe 🎭",
        "model.name=linear",
    ],
]


@pytest.mark.parametrize("overrides", [*ROUND_TRIPS, CHAIN, DOWN])
def test_toml_round_trip(tmp_path, overrides):
    """Fault: a resolved config whose file means something else: a lost None, a float as integer, a broken quote."""
    config = load(None, overrides)
    (tmp_path / "config.toml").write_text(config.to_toml(tmp_path), encoding="utf-8")
    again = load(tmp_path / "config.toml")
    assert again == config and again.to_toml() == config.to_toml()


def test_wrappers_keep_their_order(tmp_path):
    """Fault: dropout after over-invitation, where the file has it before, or the other way round."""
    texts = ["sampler.with_dropout.rate=0.5", "sampler.with_over_invitation.num_reports=5"]
    for order in (texts, texts[::-1]):
        (tmp_path / "config.toml").write_text(load(None, order).to_toml())
        wrappers = list(load(tmp_path / "config.toml").resolved()["sampler"])[2:]
        assert wrappers == [text.split(".")[1] for text in order]
    assert "dropped" in told(*algorithm_of(load(None, [*SMALL, "sampler.with_dropout.rate=0.5"])))


def test_every_problem_at_once():
    """Fault: a user who corrects one mistake a run."""
    wrong = ["run.rounds=0", "sampler.cohort_size=true", "model.name=mpl", "dta.name=digits", "algorithm.num_step=3"]
    with pytest.raises(ConfigError) as caught:
        load(None, wrong)
    assert len(caught.value.problems) == 5
    with pytest.raises(ConfigError) as caught:
        build(load(None, ["sampler.cohort_size=0", "data.alpha=-1.0", "client_optimizer.momentum=0.5", "run.lanes=4"]))
    assert [text.split(":")[0] for text in caught.value.problems] == ["sampler.cohort_size", "data.alpha"]


def test_overrides():
    """Fault: words that need quotes, a number that becomes text, an override that loses to the file."""
    config = load(EXPERIMENTS / "quickstart.toml", ["run.rounds=5", "data.alpha=1", "run.progress=false"]).resolved()
    assert config["run"]["rounds"] == 5 and config["run"]["progress"] is False
    assert config["data"]["alpha"] == 1.0 and isinstance(config["data"]["alpha"], float)
    spaced = load(None, ["data.name=heart_disease", "data.directory=/a folder/with=signs"])
    assert spaced.resolved()["data"]["directory"] == "/a folder/with=signs"


def test_wrong_configs_need_no_jax():
    """Fault: seconds of imports before a typing error is reported."""
    code = (
        "import sys\nfrom fedjax_sim.config.document import ConfigError, load\nimport fedjax_sim.command.app\n"
        "load()\ntry:\n    load(None, ['run.rounds=0'])\nexcept ConfigError:\n    print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=EXPERIMENTS.parent)
    assert done.stdout == "False\n", done.stderr


def test_identity_leaves_out_what_changes_no_bit():
    """Fault: a run that cannot be given more rounds, or one that goes on with another learning rate."""
    assert load(None, ["run.rounds=5", "run.progress=false"]).identity() == load().identity()
    assert load(None, ["client_optimizer.learning_rate=0.2"]).identity() != load().identity()


# One of each wing, and those that the test hands something of their own, unless another test here builds them.
BUILT = ("boosted_trees", "consensus", "ditto", "fedbuff", "flexlora", "histogram", "mime", "scaffold", "split_gnn")
BUILT += ("split_learning", "vertical")


def with_own(row, usual: list[str]) -> list[str]:
    """The settings of a part's row, and the usual ones, less those of a table for which the row names a part."""
    named = {setting.partition(".name=")[0] for setting in row.config if ".name=" in setting.partition("{")[0]}
    return [*(setting for setting in usual if setting.partition(".")[0] not in named), *row.config]


def unstated(row, settings: list[str]) -> list[str]:
    """Those of the settings that the part's row does not state itself."""
    stated = {setting.partition("=")[0] for setting in row.config}
    return [setting for setting in settings if setting.partition("=")[0] not in stated]


@pytest.mark.parametrize("name", cases.rows(sorted(registry.parts_of_table("algorithm")), BUILT))
def test_every_algorithm_builds(name):
    """Fault: a recipe that a config can name but not build."""
    part = registry.parts_of_table("algorithm")[name]
    needed = ("clip_norm", "cut", "distill_steps", "noise_multiplier", "graph", "mixing", "radius")
    required = [f"algorithm.{key}={NEEDED[key]}" for key in part.options if key in needed]
    required += ["data.with_groups.num_groups=12"] if "group_size" in part.values else []
    required += ["data.with_server_rows.examples=20"] if "server_data" in part.values.values() else []
    fewer = {"concurrency": 9, "buffer_size": 4, "clients_per_tier": 7}
    required += [f"algorithm.{key}={fewer[key]}" for key in part.options if key in fewer]
    required += ["devices.name=cross_silo"] * (registry.takes(part, "devices") is not None)
    small = [x for x in SMALL if x.startswith("run.") or registry.has_table(part, x.split(".")[0])]
    row = cases.CASES["algorithms"][name]
    settings = [*with_own(row, small), f"algorithm.name={name}", *unstated(row, required)]
    experiment = build(load(None, settings))
    jax.eval_shape(experiment.algorithm.init, experiment.key, experiment.params, experiment.data.train)


def test_an_algorithm_is_given_the_population_size(monkeypatch):
    """Fault: an algorithm whose state has a row a client can ask for N, and is called without it."""
    found = []

    def asking(*args, population_size, **options):
        found.append(population_size)
        return algorithms.fedavg(*args, **options)

    monkeypatch.setattr(algorithms, "asking", asking, raising=False)
    builder = Builder(load(None, SMALL))
    fedavg = builder.parts["algorithm"]
    asks = {
        "name": "asking",
        "module": "fedjax_sim.algorithms",
        "values": fedavg.values | {"population_size": "population_size"},
    }
    builder.parts["algorithm"] = fedavg._replace(**asks)
    builder.experiment()
    assert set(found) == {40}


def test_who_took_part_is_not_counted_where_nothing_is_known(monkeypatch):
    """Fault: checkpoints that list who took part in an algorithm that may be private: it states no parts."""

    def unstated(*args, **options):
        return algorithms.fedavg(*args, **options)._replace(parts=None)

    monkeypatch.setattr(algorithms, "unstated", unstated, raising=False)
    known = Builder(load(None, SMALL)).parts["algorithm"]
    hidden = known._replace(name="unstated", module="fedjax_sim.algorithms")
    for part, counted in ((known, True), (hidden, False)):
        assert ("distinct_clients" in told(*algorithm_of(load(None, SMALL), algorithm=part))) == counted


def test_the_seed_decides_the_local_test():
    """Fault: a wrapper of the data that draws from its own default seed, whatever the config's."""
    split = ["data.with_local_test.fraction=0.3"]
    read = jax.jit(lambda people: jax.vmap(people.client)(IDS).mask)
    masks = [
        np.asarray(read(Builder(load(None, [*SMALL, "data.seed=0", *split, *seed])).data().train))
        for seed in (["seed=1"], ["seed=1"], ["seed=2"], ["seed=2", "data.with_local_test.seed=1"])
    ]
    same = [np.array_equal(masks[0], other) for other in masks[1:]]
    assert same == [True, False, True]


NEEDED = {
    "distill_steps": "2", "epsilon": "1.0",
    "clip_norm": "1.0", "noise_multiplier": "1.0", "cohort_size": "10", "population_size": "40", "value": "0.1",
    "levels": "4", "initial_clip_norm": "1.0", "quantile_noise": "2.0", "factor": "0.5", "rank": "1",
    "graph": "{name='ring'}", "mixing": "{name='metropolis', graph={name='ring'}}", "radius": "1.0",
    "cut": "hidden_0", "dtype": "bfloat16", "decay": "0.9", "share": "0.5", "block_size": "8", "num_rounds": "8",
}  # fmt: skip


SOME = ("error_feedback", "gaussian_mechanism")
TRANSFORMS = sorted({**registry.parts_of_table("transform"), **registry.wrappers("transform")})


@pytest.mark.parametrize("name", cases.rows(TRANSFORMS, SOME))
def test_every_transform_builds(name):
    """Fault: a compressor or mechanism that a config can name but not build."""
    part = {**registry.parts_of_table("transform"), **registry.wrappers("transform")}[name]
    needed = [key for key, option in part.options.items() if option.default is registry.REQUIRED or key == "share"]
    row = cases.CASES["transform"][name]
    stated = {setting.partition("=")[0] for setting in row.config}
    needed = [key for key in needed if f"transform.{name}.{key}" not in stated]
    options = [f"transform.{name}.{key}={NEEDED[key]}" for key in needed]
    if name in registry.wrappers("transform"):
        options.append(f"transform.{name}.quantize.bits=4")
    elif not options and not any(key.startswith(f"transform.{name}") for key in stated):
        options = [f"transform.{name}={{}}"]
    options_of_sum = ["aggregator.name=fixed_mean", "aggregator.denominator=10.0", "algorithm.weighting=uniform"]
    told(*algorithm_of(load(None, [*SMALL, *options, *with_own(row, options_of_sum)])))


@pytest.mark.every_row
@pytest.mark.parametrize("table", ["sampler", "aggregator", "client_optimizer"])
def test_every_part_builds(table):
    """Fault: a factory that is listed but lacks what the config hands over."""
    given = {"cohort_size": "10", "rate": "0.2", "denominator": "10.0", "num_byzantine": "1", "radius": "1.0"}
    for name, part in registry.parts_of_table(table).items():
        options = [f"{table}.{key}={value}" for key, value in given.items() if key in part.options]
        row = cases.CASES.get(TABLES[table][0], {}).get(name)  # optimisers have none
        if row is not None:
            options = [*unstated(row, options), *row.config]
        small = [text for text in SMALL if not text.startswith(f"{table}.")]
        try:
            algorithm_of(load(None, [*small, f"{table}.name={name}", *options]))
        except ConfigError as error:
            error.add_note(f"{name}: what a config of it needs besides stands in its row, as `config=`")
            raise


@pytest.mark.every_row
def test_wrapped_samplers_build():
    """Fault: a wrapper of samplers that a config can name but not build, with the devices of its table if it needs a
    clock. That of distinct clients is around every sampler."""
    clock = ["devices.name=cross_silo", "sampler.with_clock.overhead_seconds=1.0", "sampler.with_clock.checks=4"]
    for name in registry.wrappers("sampler"):
        row = cases.CASES["sampling"][name]
        clocked = row().devices is not None
        options = [*unstated(row, clock), *row.config] if clocked else row.config
        if name != "with_distinct_clients":
            made, *_ = algorithm_of(load(None, [*SMALL, *options]))
            assert (made.parts.sampler.devices is not None) == clocked


@pytest.mark.every_row
def test_wrapped_rules_build():
    """Fault: a wrapper of aggregators that a config can name but not build."""
    needed = {"bucket_size": "2", "max_norm": "1.0", "num_byzantine": "1"}
    needed |= {"attack": "{name='alie'}", "who": "{name='clients', ids=[3]}"}
    for name, part in registry.wrappers("aggregator").items():
        options = [f"aggregator.{name}.{key}={needed[key]}" for key in part.options if key in needed]
        inner = ["aggregator.name=krum", "aggregator.num_byzantine=1"]
        made, *_ = algorithm_of(load(None, [*SMALL, *inner, *options]))
        assert made.parts.aggregator.start is None


NEEDED_INSIDE = {"cohort_weight": "10.0", "ids": "[3]", "share": "0.1", "factor": "2.0", "value": "1.0", "std": "1.0"}
NEEDED_INSIDE["norm"] = "1.0"
ROBUST = ["aggregator.name=krum", "aggregator.num_byzantine=1"]
POISON = ["data.label_flip.clients=[3]"]
CORRUPTED = "aggregator.corrupted."
WHO, ATTACK = CORRUPTED + "who={name='clients', ids=[3]}", CORRUPTED + "attack={name='alie'}"


@pytest.mark.parametrize("argument", ["attack", "who"])
def test_every_attack_builds(argument, monkeypatch):
    """Fault: an attack, or a choice of attackers, that a config can name but not build."""
    kind = registry.wrappers("aggregator")["corrupted"].options[argument].kind
    assert {"attack": "alie", "who": "clients"}[argument] in registry.named(kind)
    data = Builder(load(None, [*SMALL, *POISON])).data()
    monkeypatch.setattr(Builder, "data", lambda self: data)
    for name, part in registry.named(kind).items():
        needed = [f"{key}={NEEDED_INSIDE[key]}" for key, (_, default) in part.options.items() if key in NEEDED_INSIDE]
        table = f"{CORRUPTED}{argument}={{{', '.join([f'name={name!r}', *needed])}}}"
        other = WHO if argument == "attack" else ATTACK
        made, *_ = algorithm_of(load(None, [*SMALL, *POISON, *ROBUST, table, other]))
        assert "attackers_met" in {metric.name for metric in made.parts.aggregator.facts.metrics}


def test_a_part_inside_a_part(tmp_path):
    """Fault: options inside an option that are lost on the way to the factory, in a file or in a run's identity."""
    inside = "{name='forged_weight', factor=3.0, attack={name='scaled', factor=-2.0}}"
    config = load(None, [*SMALL, "aggregator.name=mean", f"{CORRUPTED}attack={inside}", WHO])
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load(tmp_path / "config.toml") == config
    other = load(None, [*SMALL, "aggregator.name=mean", f"{CORRUPTED}attack={inside.replace('-2', '2')}", WHO])
    assert other.identity() != config.identity()
    aggregator = algorithm_of(config)[0].parts.aggregator
    update, weights, ids = np.ones((2, 1), np.float32), np.ones(2, np.float32), np.array([3, 4])
    got, _ = applied(aggregator, update, weights, ids=ids)  # (3 * -2 + 1) / (3 + 1)
    np.testing.assert_allclose(got, -1.25)


@pytest.mark.parametrize(
    "settings, told",
    [
        ([WHO], r"corrupted.attack: expected a table with a name, got nothing. Write \{name = .*, alie, "),
        ([WHO, CORRUPTED + "attack=alie"], "corrupted.attack: expected a table with a name, got 'alie'"),
        ([WHO, CORRUPTED + "attack={}"], "corrupted.attack.name: expected one of .*, got nothing"),
        ([WHO, CORRUPTED + "attack.name=ali"], "corrupted.attack.name: expected .* Did you mean 'alie'"),
        ([WHO, CORRUPTED + "attack={name='alie', zz=1}"], "attack.zz: expected one of name, z, got the unknown key"),
        ([WHO, CORRUPTED + "attack={name='scaled'}"], "attack.factor: expected a finite number, got nothing"),
        ([WHO, CORRUPTED + "attack={name='min_max', direction='up'}"], "corrupted.attack.direction: expected one of"),
        ([WHO, CORRUPTED + "attack={name='forged_weight', factor=2, attack={name='alie'}}"],
         "attack.attack.name: expected one of"),
        ([ATTACK, CORRUPTED + "who={name='share_of_clients', share=1.5}"], "corrupted.who.share: expected a number"),
        ([ATTACK, CORRUPTED + "who={name='clients', ids=[40]}"], "who.ids: expected ids below the population's 40"),
        (["aggregator.name=corrupted"], r"write the table \[aggregator.corrupted\]"),
    ],
)  # fmt: skip
def test_wrong_attackers(settings, told):
    """Fault: attackers that a config states and that are silently others, or none."""
    with pytest.raises(ConfigError, match=told):
        build(load(None, [*SMALL, *settings]))


def test_every_task_builds():
    """Fault: a data set whose model or loss the config cannot find."""
    for name, model in (
        ("quadratics", "point"),
        ("synthetic", "logistic"),
        ("mean_estimation", "linear"),
        ("karate_club", "gcn"),
        ("molecules", "graph_sage"),
    ):
        options = {"karate_club": ["sampler.name=full"]}.get(name, ["data.num_clients=5", "sampler.cohort_size=5"])
        options += ["data.graphs_per_client=2", "data.num_test=2", "model.readout=mean"] * (name == "molecules")
        experiment = build(load(None, [f"data.name={name}", f"model.name={model}", *options]))
        assert jax.tree.leaves(experiment.params)


def is_defined_for(module: types.ModuleType, name: str, value: object) -> bool:
    """Whether a name is a public function or class that this subpackage has imported, or that this module defines."""
    home = getattr(value, "__module__", "")
    is_here = home.startswith("fedjax_sim.") if hasattr(module, "__path__") else home == module.__name__
    return is_here and not name.startswith("_") and inspect.isroutine(value) | inspect.isclass(value)


def test_registry_holds_what_the_subpackages_publish():
    """Fault: a factory that the registry's reading of the sources misses, or one that is not public."""
    for subpackage in registry.SUBPACKAGES:
        module = importlib.import_module(f"fedjax_sim.{subpackage}")
        names = set(registry.parts(subpackage))
        assert {name for name, value in vars(module).items() if is_defined_for(module, name, value)} <= names
        assert all(hasattr(module, name) for name in names)
        for part in registry.parts(subpackage).values():
            assert part.meaning, part
            for key, option in part.options.items():
                default = inspect.signature(getattr(module, part.name)).parameters[key].default
                expected = registry.REQUIRED if default is inspect.Parameter.empty else default
                assert option.default == (list(expected) if isinstance(expected, tuple) else expected), (part.name, key)


def test_only_the_sources_of_named_parts_are_read():
    """Fault: a look-up that reads every part's source, which took half a second of each start."""
    code = """if True:
        from fedjax_sim.config import registry, signatures
        from fedjax_sim.config.document import load
        load("quickstart")
        few = signatures._parse.cache_info().currsize
        assert "uniform" in registry.parts_of_table("sampler") and len(registry.parts_of_table("algorithm")) > 30
        print(few, signatures._parse.cache_info().currsize)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=EXPERIMENTS.parent, check=True
    )
    few, more = map(int, done.stdout.split())
    assert few < 30 and more > 2 * few  # 17 files for seven tables; the algorithms alone are in fifty


def test_seed_decides_data_model_and_rounds():
    """Fault: two seeds that share the model's start or the clients, or one seed that gives two."""
    one, same, other = (build(load(None, [*SMALL, f"seed={seed}"])) for seed in (1, 1, 2))
    equal = [
        [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)]
        for x, y in ((one.params, same.params), (one.params, other.params))
    ]
    assert all(equal[0]) and not equal[1][1]  # a kernel; biases start at zero
    assert not np.array_equal(one.data.train.indices[:50], other.data.train.indices[:50])
    assert np.array_equal(one.data.train.indices, same.data.train.indices)
    assert (one.key == same.key).all() and not (one.key == other.key).any()


def test_transforms_are_tables_in_their_order():
    """Catches a chain that is sorted, a wrapper that loses what it wraps, and options that do not come back."""
    loaded = load(None, CHAIN)
    members = loaded.resolved()["transform"]
    assert list(members) == ["error_feedback", "quantize"]
    assert members["error_feedback"]["top_k"]["share"] == 0.1 and members["quantize"]["bits"] == 4
    other = load(None, [CHAIN[1], CHAIN[0], CHAIN[2]])
    assert list(other.resolved()["transform"]) == ["quantize", "error_feedback"]
    assert other.identity() != loaded.identity()  # a resume refuses another order
    assert loaded.identity()["order"] == ["transform.error_feedback", "transform.error_feedback.top_k"] + [
        "transform.quantize"
    ]
    assert "transform" not in load(None).resolved()
    down = load(None, [text.replace("transform", "downlink") for text in CHAIN])
    assert down.resolved()["downlink"] == members and "transform" not in down.resolved()
    ids = [config.identity() for config in (down, loaded, load(None, CHAIN[2:]), load(None, [*DOWN[1::-1], DOWN[2]]))]
    assert all(ids[0] != other for other in ids[1:])  # nor another way down


@pytest.mark.parametrize(
    "members, told",
    [
        ("ef21.top_k.share=0.5", "downlink: expected no state at the receiver"),
        ("random_k.share=0.1", r"downlink: expected a compressor with E \|Q"),
        ("error_feedback.top_k.share=0.1", "downlink: expected a compressor without a memory"),
        ("top_k.count=10000000", "downlink: count: expected at most the update's"),
    ],
)
def test_what_the_model_tells_of_a_downlink(members, told):
    """Catches a refusal that comes only once a run has its folder, or without its table."""
    with pytest.raises(ConfigError, match=told):
        build(load(None, [*SMALL, f"downlink.{members}"]))


def test_the_downlink_is_the_servers():
    """Catches a downlink that is left out, applied to messages, or built in another order than the file's."""
    order = ["downlink.top_k.share=0.5", "downlink.quantize.bits=4"]
    wires = []
    for settings in ([], order[::-1], [*order, "transform.quantize.bits=8"]):
        algorithm, spec, _ = algorithm_of(load(None, [*SMALL, *settings]))
        parts = algorithm.parts
        wires.append(parts.server.wire and parts.server.wire(spec))
        assert ("transform.quantize.bits=8" in settings) == (wire_of(parts.transform, spec).bits < 32 * 310)
    by_hand = wire_of(transform.chain(transform.top_k(0.5), transform.quantize(4)), spec)
    assert wires[0] is None and wires[2] == by_hand != wires[1]


def test_records_of_the_largest_client():
    """Catches a chance of inclusion from another number than the largest client's rows, or than the one given."""
    private = ["algorithm.name=record_private_fedavg", "client_optimizer.learning_rate=0.1"]
    private += ["algorithm.clip_norm=1.0", "algorithm.noise_multiplier=1.0"]
    for given, expected in ((None, 60), (75, 75)):
        settings = private if given is None else [*private, f"algorithm.num_examples={given}"]
        algorithm, *_ = algorithm_of(load(None, [*SMALL, *settings]))
        details = algorithm.parts.client.facts.noise.details
        assert (details["num_examples"], details["rate"]) == (expected, 10 / expected)


@pytest.mark.parametrize(
    "settings, told",
    [
        (["transform.quantise.bits=8"], r"transform.quantise: expected one of .* Did you mean 'quantize'"),
        (["transform.quantize.bit=8"], r"transform.quantize.bit: expected one of .*unknown key 'bit'"),
        (["transform.quantize.bits=high"], r"transform.quantize.bits: expected an integer"),
        (["transform=quantize"], r"transform: expected a table, got 'quantize'. Write the parts as tables inside it"),
        (["transform.error_feedback={}"], r"transform.error_feedback: expected a transform to wrap, got none"),
        (["transform.quantize=8"], r"transform.quantize: expected a table"),
    ],
)
def test_wrong_transforms_are_told(settings, told):
    """Catches a compressor that is left out in silence."""
    with pytest.raises(ConfigError, match=told):
        load(None, settings)


@pytest.mark.parametrize("value", ["nan", "3.0", "true", "'3'"])
def test_a_refused_number_of_steps_is_told_once(value):
    """Fault: a second line that says that no number of steps was given."""
    with pytest.raises(ConfigError) as caught:
        load(None, [f"algorithm.num_steps={value}"])
    assert len(str(caught.value).splitlines()) == 1 and "algorithm.num_steps: expected an integer" in str(caught.value)


def test_a_statistic_has_no_model():
    """Fault: a table that no part reads; a loss of classes beside a statistic's estimate; steps that nobody takes."""
    small = ["data.name=mixture", "data.num_clients=40", "sampler.cohort_size=10", "algorithm.name=kmeans"]
    assert "model" not in load(None, small).resolved() and "client_optimizer" not in load(None, small).resolved()
    with pytest.raises(ConfigError, match=r"model: .*no such table with kmeans"):
        load(None, [*small, "model.name=mlp"])
    made = build(load(None, small))
    assert made.params == () and made.loss_fn is made.algorithm.evaluated.loss_fn
    state = made.algorithm.init(made.key, made.params, made.data.train)
    record = made.evaluation(made.algorithm.params(state))
    x = made.data.test["x"]
    centroids = np.asarray(made.algorithm.params(state)["centroids"])
    expected = ((x[:, None] - centroids[None]) ** 2).sum(-1).min(1).mean()
    assert record.keys() == {"test_loss"} and record["test_loss"] == pytest.approx(expected, rel=1e-5)
    for wrong, words in (
        ("run.personal_steps=2", "run.personal_steps: expected none here, got 2. Its clients train no model"),
        ("run.variance_probe=4", "run.variance_probe: algorithm: expected one that trains a model"),
    ):
        with pytest.raises(ConfigError, match=words):
            build(load(None, [*small, wrong]))
    with pytest.raises(ConfigError, match="data: expected rows with features x"):
        build(load(None, ["data.name=quadratics", *small[1:]]))
