"""Builds the parts of a run from a checked config, and reports every refusal by a factory with its path in the config.

Refusals are found before anything compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import aggregation, engine, tree, validate
from fedjax_sim.algorithms import fine_tuned
from fedjax_sim.config import registry
from fedjax_sim.config.document import Config
from fedjax_sim.config.factories import Maker
from fedjax_sim.config.run_checks import problems_of_experiment, problems_of_table
from fedjax_sim.config.signatures import Part
from fedjax_sim.config.value_kinds import Words, problem
from fedjax_sim.metrics import Evaluation, evaluation
from fedjax_sim.models import Model, default_loss, link_prediction, supervised
from fedjax_sim.population import FederatedData, quadratic_loss, with_public_preparation
from fedjax_sim.prng import stream
from fedjax_sim.round.costs import plan_of
from fedjax_sim.running import processes, seconds
from fedjax_sim.running.planning import fastest
from fedjax_sim.sampling import with_distinct_clients
from fedjax_sim.types import Algorithm, Array, ClientData, Groups, PyTree, noisy_parts

# The largest population whose distinct clients are counted: a checkpoint then holds one bit a client.
MOST_COUNTED = 100_000_000
# When the config is refused anyway, this many clients are enough for a data set to check its options.
DRY_CLIENTS = 100
# The input that the model of a task takes; tasks that are not listed take "features".
INPUTS = {"quadratic": "point", "next_token": "tokens"}
INPUTS |= dict.fromkeys(("node_classification", "graph_classification", "link_prediction"), "graph")
# Tasks whose labels contain padding: a padded label has no weight.
UNLABELLED = ("next_token", "node_classification", "link_prediction")


class Experiment(NamedTuple):
    """Everything that `run` takes, made from a single config."""

    key: Array  # of the rounds
    algorithm: Algorithm
    params: PyTree  # the initial model
    data: FederatedData  # `data.train` is the population
    loss_fn: Callable  # (params, examples, key) -> per-example losses
    evaluation: Callable  # params -> dict of numbers
    judged: Algorithm  # the algorithm, with `run.personal_steps` before a client's model is judged if the config asks
    config: Config  # what it was made from, with its plan
    frozen: PyTree = ()  # the state of the model, such as parameters that `models.lora` freezes

    @property
    def plan(self) -> engine.Plan:
        """Lanes and chunk, which are part of a result's identity."""
        run = self.config.tables["run"]
        return engine.Plan(run["lanes"], run["chunk"])


def build(config: Config) -> Experiment:
    """Builds the experiment that a config describes.

    The initial model and the rounds draw from the streams "init" and "rounds" of `jax.random.key(seed)`. The data set
    takes the same seed unless the config gives it a seed of its own. If no part adds noise, the log counts the
    distinct clients that took part (`distinct_clients`). A private run has no such counter, because its checkpoints
    would list who these clients were (tests/running/test_privacy_ledger.py::test_no_private_run_keeps_who_took_part).

    Args:
      config: as `config.load` returns it.

    Returns: `Experiment`. The data are loaded and the model is initialised; nothing is trained yet.

    Raises: ConfigError with every problem that the parts report.

    Guarantees:
      A refused config compiles nothing (tests/test_bad_input.py::test_wrong_combinations).
      What a run refuses, every command that reads a whole config refuses
      (tests/laws/test_refusals.py::test_every_command_refuses).
      Every part that a config can name can be built (tests/config/test_document.py::test_every_part_builds,
      ::test_every_task_builds).
      The seed determines data, model and rounds
      (tests/config/test_document.py::test_seed_decides_data_model_and_rounds).

    >>> from fedjax_sim.config.document import load
    >>> small = ["data.name=mean_estimation", "data.num_clients=100", "model.name=linear", "sampler.cohort_size=10"]
    >>> experiment = build(load(None, small))
    >>> experiment.data.train.size, sorted(experiment.params)
    (100, ['bias', 'kernel'])
    """
    with config.arithmetic():
        return Builder(config).experiment()


class Builder(Maker):
    """Makes the experiment that a config describes. Sweeps call its methods for single parts.

    Args:
      config: as `config.load` returns it.
    """

    frozen: PyTree = ()  # the state of the model

    def experiment(self) -> Experiment:
        """Makes everything that a run takes.

        Raises: ConfigError with every problem so far, as soon as a problem prevents the next part from being made.
        """
        self.problems += problems_of_table(self.tables["run"])
        stated_plan = self.plan()
        mesh = self.mesh()
        size = self.tables["data"].get("num_clients")
        sampler = None
        # A sampler that needs only the number of clients is made first, so that a wrong option is refused before the
        # data are loaded.
        if size is not None and "sampler" in self.parts and not self.reads_weights():
            sampler = self.sampler(size)
            if self.problems:
                # The config is refused anyway: few clients suffice to report what is wrong with the data's options too.
                self.make("data", num_clients=min(size, DRY_CLIENTS))
        self.stop()
        with seconds.part("data"):
            data = self.data()
        self.stop()
        population = data.train
        # The loaded data may hold another number of clients than the config asked for.
        if sampler is None or sampler.design.population_size != population.size:
            sampler = self.sampler(population.size, weights=lambda: np.asarray(population.sizes))
        model, loss_fn = self.model(data)
        self.stop()
        parts = {"sampler": sampler, "client_optimizer": self.make("client_optimizer"), "model": model}
        parts |= {table: self.chain(table, population.size) for table in registry.CHAINS}
        design = None if sampler is None else sampler.design
        known_to_aggregator = {"design": design, "population_size": data.train.size}
        known_to_aggregator["poisoned_ids"] = getattr(population, "poisoned_ids", None)
        # A server that trains itself, as a few robust rules require, does the clients' local work on rows of its own.
        if "aggregator" in self.parts and "server_work" in self.parts["aggregator"].values.values():
            known_to_aggregator |= self.server(parts, loss_fn, data)
        parts["aggregator"] = self.wrapped(
            "aggregator", **known_to_aggregator, total_weight=lambda: self.total_weight(data)
        )
        self.stop()

        def init_params(key: Array) -> PyTree:
            if "model" not in self.parts:
                return ()  # a statistic starts from an estimate of its own
            # Quadratic clients train a point in R^d, which has no model.
            return {"w": jnp.zeros(data.input_shape)} if model is None else model.init(key)[0]

        params_spec = jax.eval_shape(lambda: init_params(jax.random.key(0)))
        most_bytes = engine.total_memory()
        self.attempt("model", {}, lambda: validate.fits_in_memory("model", tree.num_bytes(params_spec), most_bytes))
        self.stop()
        # The memory plan depends on the algorithm, and the algorithm takes a plan: it is made without a plan first.
        algorithm_under_plan = partial(self.algorithm_under, parts, loss_fn, data)
        unplanned = algorithm_under_plan(None, mesh)
        # Transforms of the broadcast can be refused only here, where the shape of the broadcast is known.
        if parts["downlink"] is not None:
            self.attempt("downlink", {}, lambda: jax.eval_shape(unplanned.parts.server.init, params_spec))
            self.stop()
        fitted_plan = self.attempt("algorithm", {}, lambda: self.fitted(unplanned, params_spec, population, mesh))
        self.stop()
        plan = stated_plan or fitted_plan
        algorithm = algorithm_under_plan(plan, mesh)
        self.check_preparation(algorithm, population)
        self.stop()
        root = jax.random.key(self.tables["seed"])
        params = init_params(stream(root, "init"))
        self.problems += problems_of_experiment(self.tables["run"], algorithm, params)
        self.stop()
        # The timed trial runs in the first process alone, without a mesh, and its result is sent to the others: clocks
        # differ, but all processes must run the same program.
        if stated_plan is None and self.tables["run"]["plan"] == "trial":
            trial = partial(fastest, lambda plan: algorithm_under_plan(plan, None), root, params, population)
            plan = engine.Plan(*processes.current().from_first(trial))
            algorithm = algorithm_under_plan(plan, mesh)
        # A statistic brings the loss of its estimate; a model's loss is that of the task.
        loss_fn = algorithm.evaluated.loss_fn or loss_fn
        judged = self.fine_tuned(algorithm, loss_fn, data)
        evaluate = self.judge(self.evaluation(loss_fn, data, judged), algorithm, params, population)
        self.stop()
        return Experiment(
            key=stream(root, "rounds"),
            algorithm=algorithm,
            params=params,
            data=data,
            loss_fn=loss_fn,
            evaluation=evaluate,
            judged=judged,
            config=self.config.planned(plan),
            frozen=self.frozen,
        )

    def check_preparation(self, algorithm: Algorithm, population: Any) -> None:
        """Refuses inputs that depend on other clients' rows if a part adds noise, whatever the config is built for.

        Guarantees: no command states an epsilon for such inputs
        (tests/privacy/test_preparation.py::test_every_command_refuses).
        """
        noises = {} if algorithm.parts is None else noisy_parts(algorithm.parts)
        if not noises:
            return
        # Imported here, since few configs have noise.
        from fedjax_sim.privacy.reading import preparation_of

        units = {noise.unit for noise in noises.values()}
        unit = "record" if "record" in units else "client"
        self.attempt("data", self.parts["data"].options, partial(preparation_of, population, unit))

    def data(self) -> FederatedData | None:
        """Makes the data set inside its wrappers.

        If the algorithm needs groups of clients, the wrapper that groups clients goes around all others. Other
        algorithms pool the rows of a group, and wrappers around the groups then change the pooled rows. What is
        taken as public is taken so of all wrappers
        (tests/privacy/test_preparation.py::test_public_covers_every_wrapper).
        """
        needed = self.parts["algorithm"].values.values()
        # An algorithm that takes the units answers about the data: in their own units, unless the config scales them.
        table = self.tables["data"]
        if "units" in needed and table.get("standardise", False) is None:
            table["standardise"] = False
        needs_groups = "group_size" in needed
        return self.wrapped(
            "data",
            goes_last=lambda data: needs_groups and isinstance(data.train, Groups),
            outermost=with_public_preparation,
        )

    def reads_weights(self) -> bool:
        """Returns whether the sampler, or one of its wrappers, takes the clients' numbers of examples."""
        return any("weights" in part.values.values() for part in registry.named_in("sampler", self.tables["sampler"]))

    def sampler(self, population_size: int, **given: Any) -> Any:
        """Makes the devices of `population_size` clients, then the sampler; returns None if either is refused.

        The devices are kept in `self.devices`: every part gets them whose factory takes devices.
        """
        self.devices = self.make("devices", population_size=population_size)
        refused = "devices" in self.parts and self.devices is None
        return None if refused else self.wrapped("sampler", population_size=population_size, **given)

    def fitted(self, algorithm: Algorithm, spec: PyTree, population: Any, mesh: Any) -> engine.Plan:
        """Returns the plan of lanes and chunks for the algorithm's clients.

        On several accelerators the lanes follow from their number too, so that each has work. The run keeps the plan.

        Args:
          algorithm: the algorithm, made without a plan.
          spec: shapes and dtypes of the model.
          population: the clients.
          mesh: the devices that share a cohort, as `mesh` returns them.
        """
        star = algorithm.parts
        devices = engine.mesh_for(mesh)
        num_devices = 1 if devices is None else devices.size
        # Algorithms that are not a star have no broadcast to be measured: the model's shapes alone decide. No cohort of
        # theirs is larger than the population.
        if star is None:
            return engine.shared_out(engine.plan_for(spec), population.size, num_devices)
        broadcast = jax.eval_shape(lambda params: star.server.broadcast(star.server.init(params)), spec)
        plan = plan_of(star, broadcast, population)
        # Clients that are federations are shared out one by one, and their own clients stay on one device.
        if star.client.federation is not None:
            return plan
        return engine.shared_out(plan, star.sampler.num_slots, num_devices)

    def algorithm_under(
        self, made: dict[str, Any], loss_fn: Callable | None, data: FederatedData, plan: engine.Plan | None, mesh: Any
    ) -> Algorithm:
        """Makes the algorithm of the given parts under a plan.

        The sampler counts distinct clients where this is allowed. It is not allowed if a part adds noise, or may add
        noise: the noise hides who took part, and the counter would put a list of them into every checkpoint.

        Args:
          made: the parts by their table in the config, such as {"sampler": ..., "aggregator": ...}; None where a
            table is absent.
          loss_fn, data: the loss and the data set of the experiment.
          plan, mesh: as in `algorithms.federated`.

        Raises: ConfigError where the algorithm refuses its parts.
        """
        algorithm_part = self.parts["algorithm"]
        arguments = {
            argument: made[table] for table in made if (argument := registry.takes(algorithm_part, table)) is not None
        }
        loss = (
            default_loss(data.task, special_tokens=data.special_tokens)
            if "loss" in algorithm_part.values.values() and data.task != "quadratic"
            else None
        )
        arguments |= {
            "loss_fn": loss_fn,
            "loss": loss,
            "plan": plan,
            "mesh": mesh,
            "nonfinite": self.tables["run"]["nonfinite"],
        }
        arguments |= {"input_shape": data.input_shape, "task": data.task, "num_categories": num_categories(data)}
        arguments["population_size"] = data.train.size
        label_names = data.label_names or data.vocabulary
        arguments |= {"feature_names": data.feature_names, "label_names": label_names, "units": data.units}
        group_size = getattr(data.train, "group_size", None)
        # With groups, a client of the algorithm is a group (an edge), while devices belong to the clients inside.
        all_clients = data.train.population.size if group_size else data.train.size
        arguments |= {
            "group_size": group_size,
            "inside": {"population_size": group_size or all_clients, "all_clients": all_clients},
        }
        if made["sampler"] is not None and made["sampler"].devices is not None:
            arguments |= self.edge_devices(algorithm_part, all_clients)
        if "server_data" in algorithm_part.values.values():
            arguments["server_data"] = server_rows(data)
        # Functions, since both read the whole population: they are called only for factories that take the values.
        arguments["total_weight"] = lambda: self.total_weight(data) if self.weighs_examples() else None
        arguments["num_examples"] = lambda: self.num_examples(data)
        algorithm = self.make("algorithm", **arguments)
        self.stop()
        sampler = made["sampler"]
        may_be_private = algorithm.parts is None or noisy_parts(algorithm.parts)
        if sampler is None or may_be_private or sampler.design.population_size > MOST_COUNTED:
            return algorithm
        arguments[registry.takes(algorithm_part, "sampler")] = with_distinct_clients(sampler)
        return self.make("algorithm", **arguments)

    def edge_devices(self, part: Part, all_clients: int) -> dict[str, Any]:
        """Makes the devices of the clients under edges if the config does not name them.

        They are of the kind of [devices], one for each of the `all_clients` clients.
        """
        if "edge_devices" not in part.options or self.tables["algorithm"]["edge_devices"] is not None:
            return {}
        return {"edge_devices": self.make("devices", population_size=all_clients)}

    def server(self, made: dict[str, Any], loss_fn: Callable | None, data: FederatedData) -> dict[str, Any]:
        """Makes the local work and the rows of a server that trains itself as clients do.

        The work is read from an algorithm with the coordinate-wise median as its rule, which fits every client. The
        config's own rule cannot be made yet, because it takes this work.

        The arguments are as in `algorithm_under`.
        """
        work = self.algorithm_under(made | {"aggregator": aggregation.median()}, loss_fn, data, None, None).parts.client
        return {"server_work": work, "server_data": server_rows(data)}

    def evaluation(self, loss_fn: Callable, data: FederatedData, algorithm: Algorithm) -> Evaluation:
        """Makes the evaluation: on test and held-out data, on clients' own test rows and, by option, on training data.

        Guarantees: a model whose parties query each other over links is evaluated with these links
        (tests/config/test_split_runs.py::test_evaluations_go_through_the_links).
        """
        evaluated = algorithm.evaluated
        if evaluated.model is not None:
            loss_fn = supervised(
                evaluated.model, default_loss(data.task, special_tokens=data.special_tokens), measure=data.measure
            )
        num_train_clients = self.tables["run"]["evaluate_train"]
        train_options = {}
        if num_train_clients is not None:
            is_sample = num_train_clients != "all" and num_train_clients < data.train.size
            train_options = {
                "train": data.train,
                "train_clients": num_train_clients if is_sample else None,
                "seed": self.tables["seed"],
            }
        local_options = (
            {}
            if data.local_test is None
            else {
                "local_test": data.local_test,
                "personal": evaluated.personal,
                "has_trained": evaluated.has_trained,
                "adapt": evaluated.adapt,
                "owners": None if evaluated.adapt is None else data.train,
            }
        )
        local_options |= {"triggered": data.triggered, "perplexity": data.task == "next_token"}
        local_options["params_kind"] = algorithm.params_kind
        judge = evaluation(loss_fn, test=data.test, held_out=data.held_out, **local_options, **train_options)
        if data.local_test is None and algorithm.is_judged_by_owners:

            def nobody_judged(params: PyTree) -> tuple[dict, dict]:
                record, by_client = judge.with_clients(params)
                return record | {"personal_clients": 0}, by_client

            return replace(judge, with_clients=nobody_judged)
        return judge

    def fine_tuned(self, algorithm: Algorithm, loss_fn: Callable, data: FederatedData) -> Algorithm:
        """Returns the algorithm, with `run.personal_steps` before each client's model is judged if the config asks."""
        num_steps = self.tables["run"]["personal_steps"]
        if num_steps is None:
            return algorithm
        hint = ""
        if algorithm.evaluated.adapt is not None:
            hint = f"{self.parts['algorithm'].name} has its own step before a model is judged."
        elif "model" not in self.parts:
            hint = "Its clients train no model."
        elif algorithm.evaluated.model is not None or "client_optimizer" not in self.parts:
            hint = "Its parties train together."
        elif data.local_test is None:
            hint = "Clients need rows to be judged by: [data.with_local_test]."
        if hint:
            self.problems.append(problem("run.personal_steps", "none here", num_steps, hint))
            self.stop()
        options = {"num_steps": num_steps, "batch_size": self.tables["algorithm"].get("batch_size")}
        make = partial(fine_tuned, algorithm, loss_fn, self.make("client_optimizer"), **options)
        made = self.attempt("run.personal_steps", {}, make)
        self.stop()
        return made

    def judge(self, judge: Evaluation, algorithm: Algorithm, params: PyTree, population: Any) -> Evaluation:
        """Returns the evaluation `judge`, with the variance budget added if the config has a `run.variance_probe`."""
        count = self.tables["run"]["variance_probe"]
        if count is None:
            return judge
        # Imported here, since few configs ask for a variance budget.
        from fedjax_sim.instruments.variance_budget import variance_budget

        options = {"num_clients": min(count, population.size), "seed": self.tables["seed"]}
        measure_budget = partial(variance_budget, algorithm, params, population, **options)
        budget = self.attempt("run.variance_probe", {}, measure_budget)

        def with_clients(params: PyTree) -> tuple[dict, dict]:
            record, by_client = judge.with_clients(params)
            return record | budget(params), by_client

        return replace(judge, with_clients=with_clients)

    def model(self, data: FederatedData) -> tuple[Any, Callable | None]:
        """Makes (model, loss) for the task of the data; the model is None if the parameter is a point in R^d.

        Both are None for an algorithm that trains no model.
        """
        if "model" not in self.parts:
            return None, None
        part = self.parts["model"]
        wanted_input = INPUTS.get(data.task, "features")
        fitting = [name for name, other in registry.parts_of_table("model").items() if _takes(other, wanted_input)]
        if part.name not in fitting:
            rule = f"one of {', '.join(fitting)} for the data {data.name!r}"
            self.problems.append(problem("model.name", rule, part.name, f"Its task is {data.task}."))
            return None, None
        if wanted_input == "point":
            return None, quadratic_loss
        sizes = {"input_shape": data.input_shape, "num_features": data.input_shape[-1], "columns": data.columns}
        model = self.wrapped("model", **sizes, num_outputs=data.num_outputs)
        if model is None:
            return None, None
        frozen_state = self.frozen_state(model)
        self.frozen = () if frozen_state is None else frozen_state
        algorithm = self.parts["algorithm"]
        if frozen_state is not None and (data.task == "link_prediction" or registry.takes(algorithm, "model")):
            hint = f"{algorithm.name} on {data.task} computes with the model's parameters alone."
            self.problems.append(problem("model", "a model without frozen parameters", self.tables["model"], hint))
            return model, None
        if data.task == "link_prediction":
            return model, self.attempt("model", {}, partial(link_prediction, model))
        options = {"measure": data.measure, "frozen_state": frozen_state}
        loss_fn = self.attempt(
            "model",
            {},
            partial(supervised, model, default_loss(data.task, special_tokens=data.special_tokens), **options),
        )
        if loss_fn is not None and _inputs(part) is None:
            self.check_shapes(model, self.frozen, data)
        return model, loss_fn

    def check_shapes(self, model: Model, state: PyTree, data: FederatedData) -> None:
        """Adds a problem if a user's own model, which states no inputs, does not fit the data; nothing is computed."""
        client = jax.eval_shape(data.train.client, jax.ShapeDtypeStruct((), jnp.int32))
        rule = f"a model of inputs {[*data.input_shape]} with {data.num_outputs} outputs"

        def outputs(x: PyTree) -> Array:
            return model.apply(model.init(jax.random.key(0))[0], state, x, None, False)[0]

        try:
            shape = jax.eval_shape(outputs, client.examples["x"]).shape
        except (TypeError, ValueError) as error:
            self.problems.append(problem("model.name", rule, self.parts["model"].name, str(error).split("\n")[0]))
            return
        # A label beyond the outputs would be read as another one.
        if data.task in ("classification", "next_token") and shape[-1:] != (data.num_outputs,):
            self.problems.append(problem("model.name", rule, Words(f"outputs of shape {[*shape[1:]]}")))

    def frozen_state(self, model: Model) -> PyTree | None:
        """Returns the state of a model at the config's seed, which no round changes; None for a stateless model."""
        if not jax.tree.leaves(jax.eval_shape(lambda: model.init(jax.random.key(0))[1])):
            return None
        return model.init(stream(jax.random.key(self.tables["seed"]), "init"))[1]

    def weighs_examples(self) -> bool:
        """Returns whether clients report their number of examples as their weight."""
        return self.tables["algorithm"].get("weighting") != "uniform"

    def num_examples(self, data: FederatedData) -> int:
        """Returns the config's bound on the number of a client's rows; by default the rows of the largest client.

        Raises: ValueError for a bound below the rows of the largest client.
        """
        stated_rows = self.tables["algorithm"]["num_examples"]
        (largest_rows,) = jax.eval_shape(data.train.client, jax.ShapeDtypeStruct((), jnp.int32)).mask.shape
        if stated_rows is not None:
            validate.integer(
                "num_examples", stated_rows, largest_rows, hint=f"The largest client has {largest_rows} rows."
            )
        return largest_rows if stated_rows is None else stated_rows

    def total_weight(self, data: FederatedData) -> float:
        """Returns W, the sum of the weights that the clients of the whole population report.

        Raises: ValueError where the weights are numbers of tokens and the data are not in memory.
        """
        if not self.weighs_examples():
            return float((np.asarray(data.train.sizes) > 0).sum())
        if data.task in UNLABELLED:
            # A weight is a number of tokens or nodes. Padding has a negative label and does not count.
            if not hasattr(data.train, "examples"):
                hint = "Weight clients equally (weighting = 'uniform'), or load the data into memory."
                validate.fail("total_weight", "tokens that can be counted beforehand", type(data.train).__name__, hint)
            return float((np.asarray(data.train.examples["y"]) >= 0).sum())
        return float(np.asarray(data.train.sizes).sum(dtype=np.int64))

    def plan(self) -> engine.Plan | None:
        """Makes the plan from the config's `run.lanes` and `run.chunk`; None if the config has no lanes."""
        run = self.tables["run"]
        return run["lanes"] and self.attempt("run", run, lambda: engine.Plan.checked(run["lanes"], run["chunk"]))

    def mesh(self) -> Any:
        """Returns the devices of `run.devices`: "all", or a mesh; None, with a problem, for too many."""
        stated_devices = self.tables["run"]["devices"]
        num_visible = None if stated_devices == "all" else len(engine.visible_devices())
        if num_visible is not None and jax.process_count() > 1 and stated_devices != num_visible:
            hint = "Every process takes a share of the cohort."
            self.problems.append(problem("run.devices", '"all" with several processes', stated_devices, hint))
            return None
        if num_visible is not None and stated_devices > num_visible:
            rule = f'"all" or an integer in [1, {num_visible}]'
            self.problems.append(
                problem("run.devices", rule, stated_devices, "More are needed? Start JAX with more devices.")
            )
            return None
        return stated_devices if num_visible is None else engine.device_mesh(stated_devices)


def server_rows(data: FederatedData) -> ClientData | None:
    """Returns the server's rows as those of one client; None where the data have none."""
    if data.server is None:
        return None
    rows = jax.tree.map(jnp.asarray, data.server)
    (num_rows,) = {len(leaf) for leaf in jax.tree.leaves(rows)}
    return ClientData(rows, jnp.ones(num_rows, bool))


def num_categories(data: FederatedData) -> int | None:
    """Returns the number of values that a label y may have; None where y is no category."""
    if data.task == "binary":
        return 2
    return data.num_outputs if data.task in ("classification", "next_token") else None


def _takes(part: Part, wanted_input: str) -> bool:
    """Returns whether a model takes this kind of input; one of a user's own that states none takes what is data."""
    return _inputs(part) == wanted_input or (_inputs(part) is None and wanted_input != "point")


def _inputs(part: Part) -> str | None:
    """Returns the kind of a model's input, "point", "features", "graph" or "tokens", read from its arguments.

    None stands for a model of a user's own module whose arguments do not tell: what the data hold is tried.
    """
    passed_values = set(part.values.values())
    if "num_features" in passed_values:
        return "graph"
    if passed_values & {"columns", "input_shape"}:
        return "features"
    if part.subpackage in registry.admitted_modules():
        return None
    return "point" if part.name == "point" else "tokens"
