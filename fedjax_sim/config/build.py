"""From a config to the parts of a run; what a factory refuses is reported with its path, before anything compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import aggregation, engine, tree, validate
from fedjax_sim.config import registry
from fedjax_sim.config.document import Config
from fedjax_sim.config.factories import Maker
from fedjax_sim.config.signatures import Part
from fedjax_sim.config.value_kinds import problem
from fedjax_sim.metrics import evaluation
from fedjax_sim.models import default_loss, link_prediction, supervised
from fedjax_sim.population import FederatedData, quadratic_loss
from fedjax_sim.prng import stream
from fedjax_sim.round.costs import plan_of
from fedjax_sim.running import distributed
from fedjax_sim.running.planning import fastest
from fedjax_sim.sampling import with_distinct_clients
from fedjax_sim.types import Algorithm, Array, ClientData, PyTree, noisy_parts

__all__ = ["Builder", "Experiment", "build"]

MOST_COUNTED = 100_000_000  # largest population with `distinct_clients`: checkpoints then hold a bit a client
DRY_CLIENTS = 100  # enough for a data set to check its options when the config is refused anyway
INPUTS = {"quadratic": "point", "next_token": "tokens"}  # task -> input of its model; "features" for other tasks
INPUTS |= dict.fromkeys(("node_classification", "graph_classification", "link_prediction"), "graph")
UNLABELLED = ("next_token", "node_classification", "link_prediction")  # tasks with padding among the labels: no weight


class Experiment(NamedTuple):
    """Everything that `run` takes, from one config."""

    key: Array  # of the rounds
    algorithm: Algorithm
    params: PyTree  # the initial model
    data: FederatedData  # `data.train` is the population
    loss_fn: Callable  # (params, examples, key) -> per-example losses
    evaluation: Callable  # params -> dict of numbers
    plan: engine.Plan  # lanes and chunk; part of a result's identity, so a run writes it into its config


def build(config: Config) -> Experiment:
    """The experiment that a config describes.

    Model and rounds draw from streams of `jax.random.key(seed)` named "init" and "rounds"; the data set takes the same
    seed unless it has its own. If no part has noise, the log counts the distinct clients that took part
    (`distinct_clients`). A private run has no such counter, since its checkpoints would list who they were
    (tests/running/test_privacy_ledger.py::test_no_private_run_keeps_who_took_part).

    Args:
      config: as `config.load` returns it.

    Returns: `Experiment`; data are loaded and the model is initialised, nothing is trained.

    Raises: ConfigError with every problem that the parts report.

    Guarantees: a refused config compiles nothing (tests/test_bad_input.py::test_wrong_combinations); every part that a
    config can name can be built (tests/config/test_document.py::test_every_part_builds, ::test_every_task_builds); the
    seed determines data, model and rounds (::test_seed_decides_data_model_and_rounds).

    >>> from fedjax_sim.config.document import load
    >>> small = ["data.name=mean_estimation", "data.num_clients=100", "model.name=linear", "sampler.cohort_size=10"]
    >>> experiment = build(load(None, small))
    >>> experiment.data.train.size, sorted(experiment.params)
    (100, ['bias', 'kernel'])
    """
    return Builder(config).experiment()


class Builder(Maker):
    """Makes the experiment that a config describes; sweeps call its methods for single parts.

    Args:
      config: as `config.load` returns it.
    """

    def experiment(self) -> Experiment:
        """Everything that a run takes.

        Raises: ConfigError with every problem so far, as soon as one prevents the next part from being made.
        """
        given = self.plan()
        mesh = self.mesh()
        size = self.tables["data"].get("num_clients")
        sampler = None
        if size is not None and "sampler" in self.parts and not self.reads_weights():
            sampler = self.sampler(size)  # refused before the data are there
            if self.problems:
                self.make("data", num_clients=min(size, DRY_CLIENTS))
        self.stop()
        data = self.data()
        self.stop()
        population = data.train
        if sampler is None or sampler.design.population_size != population.size:
            sampler = self.sampler(population.size, weights=lambda: np.asarray(population.sizes))
        model, loss_fn = self.model(data)
        self.stop()
        made = {"sampler": sampler, "client_optimizer": self.make("client_optimizer"), "model": model}
        made |= {table: self.chain(table, population.size) for table in registry.CHAINS}
        design = None if sampler is None else sampler.design
        known = {"design": design, "population_size": data.train.size}
        known["poisoned_ids"] = getattr(population, "poisoned_ids", None)
        if "aggregator" in self.parts and "server_work" in self.parts["aggregator"].values.values():
            known |= self.server(made, loss_fn, data)
        made["aggregator"] = self.wrapped("aggregator", **known, total_weight=lambda: self.total_weight(data))
        self.stop()
        init = (lambda key: {"w": jnp.zeros(data.input_shape)}) if model is None else lambda key: model.init(key)[0]
        spec = jax.eval_shape(lambda: init(jax.random.key(0)))
        most = engine.total_memory()
        self.attempt("model", {}, lambda: validate.fits_in_memory("model", tree.num_bytes(spec), most))
        self.stop()
        under = partial(self.algorithm_under, made, loss_fn, data)
        unplanned = under(None, mesh)
        if made["downlink"] is not None:  # refused only once the shape of the broadcast is known
            self.attempt("downlink", {}, lambda: jax.eval_shape(unplanned.parts.server.init, spec))
            self.stop()
        fitted = self.attempt("algorithm", {}, lambda: self.fitted(unplanned, spec, population))
        self.stop()
        plan = given or fitted
        algorithm = under(plan, mesh)
        root = jax.random.key(self.tables["seed"])
        params = init(stream(root, "init"))
        if given is None and self.tables["run"]["plan"] == "trial":
            trial = partial(fastest, lambda plan: under(plan, None), root, params, population)
            plan = engine.Plan(*distributed.from_first(trial))
            algorithm = under(plan, mesh)
        judge = self.judge(self.evaluation(loss_fn, data, algorithm), algorithm, params, population)
        self.stop()
        return Experiment(stream(root, "rounds"), algorithm, params, data, loss_fn, judge, plan)

    def data(self) -> FederatedData | None:
        """The data set in its wrappers; that which groups clients goes around all others if the algorithm needs groups.

        Other algorithms pool a group's rows, and what is around the groups then changes these.
        """
        needs_groups = "group_size" in self.parts["algorithm"].values.values()
        return self.wrapped("data", goes_last=lambda data: needs_groups and hasattr(data.train, "group"))

    def reads_weights(self) -> bool:
        """Whether the sampler, or one of its wrappers, takes the clients' numbers of examples."""
        return any("weights" in part.values.values() for part in registry.named_in("sampler", self.tables["sampler"]))

    def sampler(self, population_size: int, **given: Any) -> Any:
        """The devices of so many clients, which every part gets that takes them, and the sampler; None if refused."""
        self.devices = self.make("devices", population_size=population_size)
        refused = "devices" in self.parts and self.devices is None
        return None if refused else self.wrapped("sampler", population_size=population_size, **given)

    def fitted(self, algorithm: Algorithm, spec: PyTree, population: Any) -> engine.Plan:
        """The plan for this algorithm's clients, of a model with these shapes."""
        star = algorithm.parts
        if star is None:
            return engine.plan_for(spec)
        broadcast = jax.eval_shape(lambda params: star.server.broadcast(star.server.init(params)), spec)
        return plan_of(star, broadcast, population)

    def algorithm_under(
        self, made: dict[str, Any], loss_fn: Callable | None, data: FederatedData, plan: engine.Plan | None, mesh: Any
    ) -> Algorithm:
        """The algorithm of the given parts under a plan, with a count of distinct clients where that is allowed.

        It is not where a part has noise, which hides who took part, or may have: the counter would be in every
        checkpoint.

        Args:
          made: parts by the config's table, such as {"sampler": ..., "aggregator": ...}; None where there is none.
          loss_fn, data: of the experiment.
          plan, mesh: as in `algorithms.federated`.

        Raises: ConfigError where the algorithm refuses its parts.
        """
        part = self.parts["algorithm"]
        wired = {argument: made[table] for table in made if (argument := registry.takes(part, table)) is not None}
        loss = default_loss(data.task) if "loss" in part.values.values() and data.task != "quadratic" else None
        wired |= {
            "loss_fn": loss_fn,
            "loss": loss,
            "plan": plan,
            "mesh": mesh,
            "nonfinite": self.tables["run"]["nonfinite"],
        }
        wired["population_size"] = data.train.size
        size = getattr(data.train, "group_size", None)
        everyone = data.train.population.size if size else data.train.size
        wired |= {"group_size": size, "inside": {"population_size": size or everyone, "all_clients": everyone}}
        if made["sampler"] is not None and made["sampler"].devices is not None:
            wired |= self.edge_devices(part, everyone)
        wired["total_weight"] = lambda: self.total_weight(data) if self.weighs_examples() else None
        wired["num_examples"] = lambda: self.num_examples(data)
        algorithm = self.make("algorithm", **wired)
        self.stop()
        sampler = made["sampler"]
        private = algorithm.parts is None or noisy_parts(algorithm.parts)
        if sampler is None or private or sampler.design.population_size > MOST_COUNTED:
            return algorithm
        wired[registry.takes(part, "sampler")] = with_distinct_clients(sampler)
        return self.make("algorithm", **wired)

    def edge_devices(self, part: Part, all_clients: int) -> dict[str, Any]:
        """The devices of clients under edges where the config does not name them: as many of the kind of [devices]."""
        if "edge_devices" not in part.options or self.tables["algorithm"]["edge_devices"] is not None:
            return {}
        return {"edge_devices": self.make("devices", population_size=all_clients)}

    def server(self, made: dict[str, Any], loss_fn: Callable | None, data: FederatedData) -> dict[str, Any]:
        """Local work and rows of a server that trains itself, as clients do; made beside a rule that any client fits.

        Arguments as in `algorithm_under`.
        """
        work = self.algorithm_under(made | {"aggregator": aggregation.median()}, loss_fn, data, None, None).parts.client
        if data.server is None:
            return {"server_work": work, "server_data": None}
        rows = jax.tree.map(jnp.asarray, data.server)
        (number,) = {len(leaf) for leaf in jax.tree.leaves(rows)}
        return {"server_work": work, "server_data": ClientData(rows, jnp.ones(number, bool))}

    def evaluation(self, loss_fn: Callable, data: FederatedData, algorithm: Algorithm) -> Callable:
        """The evaluation on test and held-out data, on clients' own test rows, and, by option, on the training data.

        Guarantees: a model whose parties ask each other over links is judged with these
        (tests/config/test_split_runs.py::test_evaluations_go_through_the_links).
        """
        asked = algorithm.evaluated
        if asked.model is not None:
            loss_fn = supervised(asked.model, default_loss(data.task), measure=data.measure)
        clients = self.tables["run"]["evaluate_train"]
        train = {}
        if clients is not None:
            some = clients != "all" and clients < data.train.size
            train = {"train": data.train, "train_clients": clients if some else None, "seed": self.tables["seed"]}
        own = {} if data.local_test is None else {"local_test": data.local_test, "personal": asked.personal}
        own["triggered"] = data.triggered
        return evaluation(loss_fn, test=data.test, held_out=data.held_out, **own, **train)

    def judge(self, judge: Callable, algorithm: Algorithm, params: PyTree, population: Any) -> Callable:
        """The evaluation `judge`, extended by the variance budget if the config has a `run.variance_probe`."""
        count = self.tables["run"]["variance_probe"]
        if count is None:
            return judge
        from fedjax_sim.instruments.variance_budget import variance_budget

        options = {"num_clients": min(count, population.size), "seed": self.tables["seed"]}
        call = partial(variance_budget, algorithm, params, population, **options)
        budget = self.attempt("run.variance_probe", {}, call)
        return lambda params: judge(params) | budget(params)

    def model(self, data: FederatedData) -> tuple[Any, Callable | None]:
        """(Model, loss) for the task of the data; the model is None for a point in R^d."""
        part = self.parts["model"]
        wanted = INPUTS.get(data.task, "features")
        if _inputs(part) != wanted:
            fitting = [name for name, other in registry.parts_of_table("model").items() if _inputs(other) == wanted]
            rule = f"one of {', '.join(fitting)} for the data {data.name!r}"
            self.problems.append(problem("model.name", rule, part.name, f"Its task is {data.task}."))
            return None, None
        if wanted == "point":
            return None, quadratic_loss
        sizes = {"input_shape": data.input_shape, "num_features": data.input_shape[-1], "columns": data.columns}
        made = self.make("model", **sizes, num_outputs=data.num_outputs)
        if made is None:
            return None, None
        if data.task == "link_prediction":
            return made, self.attempt("model", {}, partial(link_prediction, made))
        return made, self.attempt("model", {}, partial(supervised, made, default_loss(data.task), measure=data.measure))

    def weighs_examples(self) -> bool:
        """Whether clients report their number of examples as their weight."""
        return self.tables["algorithm"].get("weighting") != "uniform"

    def num_examples(self, data: FederatedData) -> int:
        """The config's bound on a client's rows; by default the rows of the largest client.

        Raises: ValueError for a bound below those.
        """
        given = self.tables["algorithm"]["num_examples"]
        (rows,) = jax.eval_shape(data.train.client, jax.ShapeDtypeStruct((), jnp.int32)).mask.shape
        if given is not None:
            validate.integer("num_examples", given, rows, hint=f"The largest client has {rows} rows.")
        return rows if given is None else given

    def total_weight(self, data: FederatedData) -> float:
        """W, the sum of the weights that the clients of the whole population report.

        Raises: ValueError where the weights are tokens and the data are not in memory.
        """
        if not self.weighs_examples():
            return float((np.asarray(data.train.sizes) > 0).sum())
        if data.task in UNLABELLED:  # weights are tokens or nodes, without padding
            if not hasattr(data.train, "examples"):
                hint = "Weight clients equally (weighting = 'uniform'), or load the data into memory."
                validate.fail("total_weight", "tokens that can be counted beforehand", type(data.train).__name__, hint)
            return float((np.asarray(data.train.examples["y"]) >= 0).sum())
        return float(np.asarray(data.train.sizes).sum(dtype=np.int64))

    def plan(self) -> engine.Plan | None:
        """The plan of the config's `run.lanes` and `run.chunk`; None without."""
        run = self.tables["run"]
        return run["lanes"] and self.attempt("run", run, lambda: engine.Plan.checked(run["lanes"], run["chunk"]))

    def mesh(self) -> Any:
        """The devices of the config's `run.devices`: "all", or a mesh; None, with a problem, for too many."""
        devices = self.tables["run"]["devices"]
        visible = None if devices == "all" else len(jax.devices())
        if visible is not None and jax.process_count() > 1 and devices != visible:
            hint = "Every process takes a share of the cohort."
            self.problems.append(problem("run.devices", '"all" with several processes', devices, hint))
            return None
        if visible is not None and devices > visible:
            rule = f'"all" or an integer in [1, {visible}]'
            self.problems.append(problem("run.devices", rule, devices, "More are needed? Start JAX with more devices."))
            return None
        return devices if visible is None else engine.device_mesh(devices)


def _inputs(part: Part) -> str:
    """The kind of a model's input: "point", "features", "graph" or "tokens"."""
    asked = set(part.values.values())
    if "num_features" in asked:
        return "graph"
    return "point" if part.name == "point" else "features" if asked & {"columns", "input_shape"} else "tokens"
