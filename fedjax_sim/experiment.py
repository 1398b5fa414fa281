"""From a config to the parts of a run; what a factory refuses is told with its dotted path, before anything compiles."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, registry
from fedjax_sim.config import Config, ConfigError, problem
from fedjax_sim.metrics import evaluation
from fedjax_sim.models import default_loss, supervised
from fedjax_sim.population import FederatedData, quadratic_loss
from fedjax_sim.prng import stream
from fedjax_sim.registry import Part
from fedjax_sim.types import Algorithm, Array, PyTree

__all__ = ["Experiment", "build"]

DRY_CLIENTS = 100  # enough for a data set to check its options when the config is refused anyway


class Experiment(NamedTuple):
    """Everything that `run` takes, from one config."""

    config: Config
    key: Array  # of the rounds
    algorithm: Algorithm
    params: PyTree
    data: FederatedData
    loss_fn: Callable
    evaluation: Callable


def build(config: Config) -> Experiment:
    """Builds the parts that a config names and wires them up.

    Raises: ConfigError with every problem that the parts report.

    Guarantees: a refused config compiles nothing (tests/test_bad_input.py).
    """
    return _Builder(config).experiment()


class _Builder:
    def __init__(self, config: Config):
        self.config = config
        self.tables = config.resolved()
        self.problems: list[str] = []

    def experiment(self) -> Experiment:
        tables, seed = self.tables, self.tables["seed"]
        run = tables["run"]
        optimizer = self.make("client_optimizer") if "client_optimizer" in tables else None
        plan = run["lanes"] and self.attempt("run", None, lambda: engine.Plan.checked(run["lanes"], run["chunk"]))
        mesh = run["devices"]
        if mesh != "all":
            mesh = self.attempt("run", None, lambda: engine.device_mesh(run["devices"]), {"num_devices": "devices"})
        size = tables["data"].get("num_clients")
        if size is not None:  # the sampler can be refused before the data are there
            sampler = self.sampler({"population_size": size})
        if self.problems and size is not None:
            self.make("data", seed=seed, num_clients=min(size, DRY_CLIENTS))
        data = None if self.problems else self.make("data", seed=seed)
        if data is None:
            raise ConfigError(self.problems)
        if size is None or size != data.train.size:
            sampler = self.sampler({"population_size": data.train.size}, data)
        model = self.model(data)
        loss_fn = quadratic_loss if data.task == "quadratic" else None
        if model is not None and loss_fn is None:
            loss_fn = self.attempt("model", None, lambda: supervised(model, default_loss(data.task)))
        aggregator = self.aggregator(sampler, data) if sampler and "aggregator" in tables else None
        if self.problems:
            raise ConfigError(self.problems)
        context = {"loss_fn": loss_fn, "sampler": sampler, "optimizer": optimizer, "aggregator": aggregator}
        part = registry.table("algorithm")[tables["algorithm"]["name"]]
        extra = {"nonfinite": run["nonfinite"], "plan": plan or None, "mesh": mesh} if part.open else {}
        algorithm = self.make("algorithm", **{k: v for k, v in context.items() if k in part.context}, **extra)
        if self.problems:
            raise ConfigError(self.problems)
        root = jax.random.key(seed)
        params = jnp.zeros(data.input_shape) if data.task == "quadratic" else model.init(stream(root, "init"))[0]
        judge = evaluation(loss_fn, test=data.test, held_out=data.held_out)
        return Experiment(self.config, stream(root, "rounds"), algorithm, params, data, loss_fn, judge)

    def sampler(self, context: dict[str, Any], data: FederatedData | None = None) -> Any:
        """The sampler with its wrappers, in the order of the file."""
        part = registry.table("sampler")[self.tables["sampler"]["name"]]
        if "weights" in part.context:
            if data is None:
                return None
            context = {"weights": np.asarray(data.train.sizes)}
        made = self.make("sampler", **context)
        for name, wrapper in registry.wrappers("sampler").items():
            assert name == wrapper.name
        for name, options in self.tables["sampler"].items():
            if isinstance(options, dict) and made is not None:
                inner, wrapper = made, registry.wrappers("sampler")[name]
                made = self.attempt(f"sampler.{name}", wrapper, lambda i=inner, w=wrapper, o=options: _factory(w)(i, **o))
        return made

    def model(self, data: FederatedData) -> Any:
        part = registry.table("model")[self.tables["model"]["name"]]
        kinds = {"quadratic": "point", "next_token": "tokens"}
        kind = "point" if part.name == "point" else "features" if "input_shape" in part.context else "tokens"
        wanted = kinds.get(data.task, "features")
        if kind != wanted:
            fit = [p.name for p in registry.table("model").values() if _takes(p) == wanted]
            rule = f"a model for the task {data.task!r} of {data.name}: {', '.join(fit)}"
            self.problems.append(problem("model.name", rule, part.name))
            return None
        if kind == "point":
            return None
        given = {"input_shape": data.input_shape, "num_outputs": data.num_outputs}
        return self.make("model", **{name: value for name, value in given.items() if name in part.context})

    def aggregator(self, sampler: Any, data: FederatedData) -> Any:
        part = registry.table("aggregator")[self.tables["aggregator"]["name"]]
        context: dict[str, Any] = {"design": sampler.design} if "design" in part.context else {}
        if "total_weight" in part.context:
            context["total_weight"] = float(np.asarray(data.train.sizes).sum(dtype=np.int64))
        return self.make("aggregator", **context)

    def make(self, table: str, **context: Any) -> Any:
        """The part that a table names, from its options and what other parts decide."""
        part = registry.table(table)[self.tables[table]["name"]]
        options = {key: value for key, value in self.tables[table].items() if key in part.options}
        if "seed" not in part.options:
            context.pop("seed", None)
        return self.attempt(table, part, lambda: _factory(part)(**context | options))
