"""Builds the objects of a run from resolved tables, the last of three passes; refusals have their path in the config.

What a factory refuses is found before anything compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import aggregation, engine, tree, validate
from fedjax_sim.config import registry
from fedjax_sim.config.data_facts import data_set_facts, num_examples, server_rows, total_weight
from fedjax_sim.config.document import Config, ConfigError
from fedjax_sim.config.factories import Maker
from fedjax_sim.config.judging import evaluation_of, judged_algorithm, with_variance_budget
from fedjax_sim.config.run_checks import problems_of_experiment, problems_of_table
from fedjax_sim.config.signatures import Part
from fedjax_sim.config.task_model import TaskModel, task_model
from fedjax_sim.config.value_kinds import problem
from fedjax_sim.models import Model, default_loss
from fedjax_sim.population import FederatedData, with_public_preparation
from fedjax_sim.population.protocol import sizes_of
from fedjax_sim.prng import stream
from fedjax_sim.round.costs import plan_of
from fedjax_sim.running import processes, seconds
from fedjax_sim.running.planning import fastest
from fedjax_sim.sampling import with_distinct_clients
from fedjax_sim.types import Algorithm, Array, Groups, PyTree, noisy_parts

# The largest population whose distinct clients are counted: a checkpoint then holds one bit a client.
MOST_COUNTED = 100_000_000
# When the config is refused anyway, this many clients are enough for a data set to check its options.
DRY_CLIENTS = 100


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
    # The algorithm, the data and the config of one `build`; None for an experiment that was put together otherwise
    built: tuple[Algorithm, FederatedData, Config] | None = None

    @property
    def follows_from_config(self) -> bool:
        """Whether the algorithm and the data are those that `build` made of this config."""
        parts = self.algorithm, self.data, self.config
        return self.built is not None and all(x is y for x, y in zip(parts, self.built, strict=True))

    @property
    def plan(self) -> engine.Plan:
        """Lanes and chunk, which are part of a result's identity."""
        run = self.config.tables["run"]
        return engine.Plan(run["lanes"], run["chunk"])


class Ingredients(NamedTuple):
    """What an algorithm is made of."""

    data: FederatedData
    model: Model | None
    loss_fn: Callable | None  # (params, examples, key) -> per-example losses
    # The parts by their table in the config, such as {"sampler": ..., "aggregator": ...}; None where a table is absent.
    parts: dict[str, Any]


def build(config: Config) -> Experiment:
    """Builds the experiment that a config describes.

    The initial model and the rounds draw from the streams "init" and "rounds" of `jax.random.key(seed)`. The data set
    takes the same seed unless the config gives it a seed of its own. If no part adds noise, the log counts the
    distinct clients that took part (`distinct_clients`). A private run has no such counter, because its checkpoints
    would list who these clients were (tests/running/test_privacy_ledger.py::test_no_private_run_keeps_who_took_part).

    Args:
      config: as `config.load` returns it.

    Returns: `Experiment`. The data are loaded and the model is initialised; nothing is trained yet.

    Raises: ConfigError with every problem that the parts report; TypeError for an argument that is no `Config`.

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
    if not isinstance(config, Config):
        validate.fail("config", "a Config", type(config).__name__, "Read one: config.load(path).", TypeError)
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
        early_sampler = self.sampler_before_data()
        self.stop()
        with seconds.timed_part("data"):
            data = self.data()
        self.stop()
        assert data is not None, "`stop` raises where the data were refused"
        ingredients = self.ingredients(data, early_sampler)
        params_spec = self.params_spec(ingredients)
        fitted_plan = self.fitted_plan(ingredients, params_spec, mesh)
        plan = stated_plan or fitted_plan
        algorithm = self.algorithm_under(ingredients, plan, mesh)
        self.check_preparation(algorithm, data.train)
        self.stop()
        root = jax.random.key(self.tables["seed"])
        params = self.first_params(ingredients, stream(root, "init"))
        self.problems += problems_of_experiment(self.tables["run"], algorithm, params)
        self.stop()
        if stated_plan is None and self.tables["run"]["plan"] == "trial":
            plan = self.fastest_plan(ingredients, root, params)
            algorithm = self.algorithm_under(ingredients, plan, mesh)
        # A statistic brings the loss of its estimate; a model's loss is that of the task.
        loss_fn = algorithm.evaluated.loss_fn or ingredients.loss_fn
        if loss_fn is None:
            rule = "an algorithm that takes a model, or brings the loss of its estimate"
            raise ConfigError([problem("algorithm.name", rule, self.parts["algorithm"].name)])
        judged = judged_algorithm(self, algorithm, loss_fn, data)
        task = TaskModel(ingredients.model, ingredients.loss_fn, self.frozen)
        judge = evaluation_of(self, loss_fn, data, judged, task)
        judge = with_variance_budget(self, judge, algorithm, params, data.train)
        self.stop()
        planned = self.config.planned(plan)
        return Experiment(
            key=stream(root, "rounds"),
            algorithm=algorithm,
            params=params,
            data=data,
            loss_fn=loss_fn,
            evaluation=judge,
            judged=judged,
            config=planned,
            frozen=self.frozen,
            built=(algorithm, data, planned),
        )

    # ---- data, and what stands before them

    def plan(self) -> engine.Plan | None:
        """Makes the plan from the config's `run.lanes` and `run.chunk`; None if the config has no lanes."""
        run = self.tables["run"]
        return run["lanes"] and self.attempt("run", run, lambda: engine.Plan.checked(run["lanes"], run["chunk"]))

    def mesh(self) -> Any:
        """Returns the devices of `run.devices`: "all", or a mesh; None, with a problem, for too many."""
        stated_devices = self.tables["run"]["devices"]
        if stated_devices == "all":
            return stated_devices
        num_visible = len(engine.visible_devices())
        if jax.process_count() > 1 and stated_devices != num_visible:
            hint = "Every process takes a share of the cohort."
            self.problems.append(problem("run.devices", '"all" with several processes', stated_devices, hint))
            return None
        if stated_devices > num_visible:
            rule = f'"all" or an integer in [1, {num_visible}]'
            self.problems.append(
                problem("run.devices", rule, stated_devices, "More are needed? Start JAX with more devices.")
            )
            return None
        return engine.device_mesh(stated_devices)

    def sampler_before_data(self) -> Any:
        """Makes a sampler that needs only the number of clients: wrong options are refused before data are read.

        Returns: None for a sampler that needs more, and for one that is refused.
        """
        size = self.tables["data"].get("num_clients")
        if size is None or "sampler" not in self.parts or self.reads_weights():
            return None
        sampler = self.sampler(size)
        if self.problems:
            # The config is refused anyway: few clients suffice to report what is wrong with the data's options too.
            self.make("data", num_clients=min(size, DRY_CLIENTS))
        return sampler

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

    # ---- what the algorithm is made of

    def ingredients(self, data: FederatedData, sampler: Any) -> Ingredients:
        """Makes the parts that an algorithm takes.

        Args:
          data: the data set.
          sampler: as `sampler_before_data` returns it.

        Raises: ConfigError with what the parts refuse.
        """
        population = data.train
        # The loaded data may hold another number of clients than the config asked for.
        if sampler is None or sampler.design.population_size != population.size:
            sampler = self.sampler(population.size, weights=lambda: np.asarray(sizes_of(population)))
        model, loss_fn = self.model(data)
        self.stop()
        parts = {"sampler": sampler, "client_optimizer": self.make("client_optimizer"), "model": model}
        parts |= {table: self.chain(table, population.size) for table in ("transform", "downlink")}
        ingredients = Ingredients(data, model, loss_fn, parts)
        aggregator = self.aggregator(ingredients)
        self.stop()
        return ingredients._replace(parts=parts | {"aggregator": aggregator})

    def model(self, data: FederatedData) -> tuple[Model | None, Callable | None]:
        """Makes (model, loss) for the task of the data, as `task_model`, and keeps the model's state."""
        model, loss_fn, self.frozen = task_model(self, data)
        return model, loss_fn

    def aggregator(self, ingredients: Ingredients) -> Any:
        """Makes the aggregator; None, with a problem, if it is refused, and for an algorithm that takes none."""
        population, sampler = ingredients.data.train, ingredients.parts["sampler"]
        known = {
            "design": None if sampler is None else sampler.design,
            "population_size": population.size,
            "poisoned_ids": getattr(population, "poisoned_ids", None),
            "total_weight": lambda: total_weight(ingredients.data, self.weighs_examples()),
        }
        # A server that trains itself, as a few robust rules require, does the clients' local work on rows of its own.
        if "aggregator" in self.parts and "server_work" in self.parts["aggregator"].values.values():
            known |= {"server_work": self.server_work(ingredients), "server_data": server_rows(ingredients.data)}
        return self.wrapped("aggregator", **known)

    def server_work(self, ingredients: Ingredients) -> Any:
        """Makes the local work of a server that trains itself as clients do.

        The work is read from an algorithm with the coordinate-wise median as its rule, which fits every client. The
        config's own rule cannot be made yet, because it takes this work.

        Args:
          ingredients: what the algorithm is made of, but for its aggregator.

        Raises: ConfigError for an algorithm that does not state its parts.
        """
        with_median = ingredients._replace(parts=ingredients.parts | {"aggregator": aggregation.median()})
        star = self.algorithm_under(with_median, None, None).parts
        if star is None:
            hint = f"{self.parts['algorithm'].name} does not state the work of its clients: Algorithm.parts."
            rule = "a rule whose server does not train"
            raise ConfigError([problem("aggregator.name", rule, self.parts["aggregator"].name, hint)])
        return star.client

    def weighs_examples(self) -> bool:
        """Returns whether clients report their number of examples as their weight."""
        return self.tables["algorithm"].get("weighting") != "uniform"

    # ---- the first model

    def first_params(self, ingredients: Ingredients, key: Array) -> PyTree:
        """Makes the initial params."""
        if "model" not in self.parts:
            return ()  # a statistic starts from an estimate of its own
        # Quadratic clients train a point in R^d, which has no model.
        return (
            {"w": jnp.zeros(ingredients.data.input_shape)}
            if ingredients.model is None
            else ingredients.model.init(key)[0]
        )

    def params_spec(self, ingredients: Ingredients) -> PyTree:
        """Returns shapes and dtypes of the params.

        Raises: ConfigError for a model that does not fit into memory.
        """
        spec = jax.eval_shape(lambda: self.first_params(ingredients, jax.random.key(0)))
        most_bytes = engine.total_memory()
        self.attempt("model", {}, lambda: validate.fits_in_memory("model", tree.num_bytes(spec), most_bytes))
        self.stop()
        return spec

    # ---- the plan of lanes and chunks

    def fitted_plan(self, ingredients: Ingredients, params_spec: PyTree, mesh: Any) -> engine.Plan:
        """Returns the plan that fits the algorithm, which is made without a plan first, since its plan depends on it.

        Args:
          ingredients, mesh: as for `algorithm_under`.
          params_spec: shapes and dtypes of the params.

        Raises: ConfigError for transforms of the broadcast, or an algorithm, that refuse params of these shapes.
        """
        unplanned = self.algorithm_under(ingredients, None, mesh)
        # Transforms of the broadcast can be refused only here, where the shape of the broadcast is known.
        star = unplanned.parts
        if star is not None and ingredients.parts["downlink"] is not None:
            self.attempt("downlink", {}, lambda: jax.eval_shape(star.server.init, params_spec))
            self.stop()
        plan = self.attempt("algorithm", {}, lambda: self.fitted(unplanned, params_spec, ingredients.data.train, mesh))
        self.stop()
        return plan

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

    def fastest_plan(self, ingredients: Ingredients, root: Array, params: PyTree) -> engine.Plan:
        """Returns the fastest plan of a timed trial.

        The trial runs in the first process alone, without a mesh, and its result is sent to the others: clocks differ,
        but all processes must run the same program.

        Args:
          ingredients: what the algorithm is made of.
          root: the key of the config's seed.
          params: the initial params.
        """
        trial = partial(
            fastest, lambda plan: self.algorithm_under(ingredients, plan, None), root, params, ingredients.data.train
        )
        return engine.Plan(*processes.current().from_first(trial))

    # ---- the algorithm

    def algorithm_under(self, ingredients: Ingredients, plan: engine.Plan | None, mesh: Any) -> Algorithm:
        """Makes the algorithm under a plan.

        The sampler counts distinct clients where this is allowed. It is not allowed if a part adds noise, or may add
        noise: the noise hides who took part, and the counter would put a list of them into every checkpoint.

        Args:
          ingredients: what the algorithm is made of.
          plan, mesh: as in `algorithms.federated`.

        Raises: ConfigError where the algorithm refuses its parts.
        """
        part, sampler = self.parts["algorithm"], ingredients.parts["sampler"]
        arguments = self.arguments_of(part, ingredients) | {"plan": plan, "mesh": mesh}
        algorithm = self.make("algorithm", **arguments)
        self.stop()
        may_be_private = algorithm.parts is None or noisy_parts(algorithm.parts)
        argument = registry.takes(part, "sampler")
        if argument is None or sampler is None or may_be_private or sampler.design.population_size > MOST_COUNTED:
            return algorithm
        arguments[argument] = with_distinct_clients(sampler)
        return self.make("algorithm", **arguments)

    def arguments_of(self, part: Part, ingredients: Ingredients) -> dict[str, Any]:
        """Returns what an algorithm's factory may take, but for its options, its plan and its mesh.

        Args:
          part: the algorithm, from the registry.
          ingredients: what the algorithm is made of.
        """
        data, sampler = ingredients.data, ingredients.parts["sampler"]
        taken = set(part.values.values())
        parts = {registry.takes(part, table): value for table, value in ingredients.parts.items()}
        arguments = {argument: value for argument, value in parts.items() if argument is not None}
        arguments |= data_set_facts(data) | {
            "loss_fn": ingredients.loss_fn,
            "nonfinite": self.tables["run"]["nonfinite"],
        }
        arguments["loss"] = None
        if "loss" in taken and data.task != "quadratic":
            arguments["loss"] = default_loss(data.task, special_tokens=data.special_tokens)
        if sampler is not None and sampler.devices is not None:
            arguments |= self.edge_devices(part, arguments["inside"]["all_clients"])
        if "server_data" in taken:
            arguments["server_data"] = server_rows(data)
        # Functions, since both read the whole population: they are called only for factories that take the values.
        by_examples = self.weighs_examples()
        arguments["total_weight"] = lambda: total_weight(data, by_examples) if by_examples else None
        arguments["num_examples"] = lambda: num_examples(data, self.tables["algorithm"]["num_examples"])
        return arguments

    def edge_devices(self, part: Part, all_clients: int) -> dict[str, Any]:
        """Makes the devices of the clients under edges if the config does not name them.

        They are of the kind of [devices], one for each of the `all_clients` clients.
        """
        if "edge_devices" not in part.options or self.tables["algorithm"]["edge_devices"] is not None:
            return {}
        return {"edge_devices": self.make("devices", population_size=all_clients)}

    def check_preparation(self, algorithm: Algorithm, population: Any) -> None:
        """Refuses inputs that depend on other clients' rows if a part adds noise, whatever the config is built for.

        Args:
          algorithm: whose parts may add noise; one that does not state its parts is not refused.
          population: the clients, with what was learned from their rows.

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
