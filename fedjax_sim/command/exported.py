"""Finds what `fedjax-sim export` writes of a run: the model, a client's own model, or one of several models."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_sim.command.folders import rounds_at_end
from fedjax_sim.config.document import ConfigError
from fedjax_sim.config.value_kinds import Words, problem
from fedjax_sim.types import ParamsKind

MOST_BYTES = 1 << 32  # of all clients' models, which are held in memory
BLOCK = 256  # clients whose models are made at once


class ModelChoice(NamedTuple):
    """What is asked for: by default the model. At most one field is set."""

    client: int | None = None  # a client's own model
    clients: bool = False  # the own models of all clients
    model: int | None = None  # one of several models
    params: bool = False  # the algorithm's params, whatever they are


class Exported(NamedTuple):
    """Arrays by name, and what they are."""

    round: int  # of the newest checkpoint
    arrays: dict[str, Any]  # NumPy
    words: str


def exported(run: Path, choice: ModelChoice, *, allow_previous: bool = False) -> Exported:
    """Returns the arrays of a run's newest checkpoint.

    Own models of all clients have a leading axis: row i is client i's. `has_trained` [N] is beside them where the
    algorithm knows it; a client that has not trained has the model that it would begin with.

    Args:
      run: the run's folder.
      choice: what is asked for.
      allow_previous: take an earlier checkpoint, with a warning, if the newest is damaged or missing.

    Raises: FileNotFoundError for a folder without config.toml or checkpoint; CheckpointError for files that were
      changed, or whose state is not the config's; ConfigError where the config can no longer be built, and for a choice
      that the run does not have.

    Guarantees: the arrays are those that the run ended with (tests/command/test_compare.py::test_the_model_of_a_run);
    own models are those that the run was judged by, and what is no model is not written as one
    (tests/command/test_export.py).
    """
    import jax
    import jax.numpy as jnp

    from fedjax_sim import engine
    from fedjax_sim.config.build import build
    from fedjax_sim.config.document import load
    from fedjax_sim.running import checkpoint, checksums

    if not (run / "config.toml").is_file():
        raise FileNotFoundError(f"RUN: expected a run's folder, with config.toml, got {str(run)!r}.")
    checksums.check_files(run, ["config.toml"])
    newest = checkpoint.latest(run / "checkpoints", allow_previous=allow_previous)
    if newest is None:
        raise FileNotFoundError(f"RUN: expected a folder with a checkpoint, got {str(run)!r}.")
    if not allow_previous and (trouble := checkpoint.trouble_with_newest(run / "checkpoints", rounds_at_end(run))):
        raise checkpoint.CheckpointError(f"{trouble} --allow-previous exports the model of that round.")
    config = load(run / "config.toml", ["run.log=none"])  # nothing is logged, and no logger need be installed
    with config.arithmetic(), engine.client_memory(config.resolved()["run"]["client_memory"], run):
        experiment = build(config)
        _check(experiment, choice)
        initial = jax.eval_shape(experiment.algorithm.init, experiment.key, experiment.params, experiment.data.train)
        if (choice.client is not None or choice.clients) and engine.memory_files(initial):
            hint = "From Python, run(..., resume=True) on a copy of the folder returns the state."
            raise ConfigError([problem("RUN", "client memory in the checkpoint", Words("memory on disk"), hint)])
        state, meta = checkpoint.restore(newest, engine.gathered(initial, spec=True))
        _tell_of_edits(meta["identity"].get("modules", {}), config)
        state = jax.tree.map(jnp.asarray, state)  # as the algorithm's functions expect it
        params = experiment.algorithm.params(state)
        if choice.model is not None:
            named, words = _one_of_several(experiment, state, choice.model)
        elif choice.client is not None or choice.clients:
            named, words = _own_models(experiment, state, params, choice)
        else:
            named, words = _by_name(params), experiment.algorithm.params_kind.value
    return Exported(meta["round"], named, words)


def _tell_of_edits(stored: Mapping[str, str], config: Any) -> None:
    """Warns if the user's modules are not those of the checkpoint: the model is then read as their new text says."""
    from fedjax_sim.config.own_modules import digests_of_modules

    now = digests_of_modules(config.tables["run"]["modules"] or [])
    changed = sorted(name for name in stored.keys() | now.keys() if stored.get(name) != now.get(name))
    if changed:
        words = f"{', '.join(changed)}: changed after the checkpoint. The model is read as the new text says."
        warnings.warn(words, RuntimeWarning, stacklevel=2)


def _check(experiment: Any, choice: ModelChoice) -> None:
    """Raises ConfigError for a choice that the run does not have, with the choices that it has.

    Args:
      experiment: what `config.build` made of the run's config.
      choice: what is asked for.
    """
    judged = experiment.judged
    evaluated, kind = judged.evaluated, judged.params_kind
    has_own = evaluated.personal is not None or evaluated.adapt is not None
    size = experiment.data.train.size
    options = []
    if has_own:
        options.append(f"a client's own model (--client 0 to {size - 1}), those of all (--clients all)")
    if evaluated.models is not None:
        options.append("one of the models (--model 0)")
    refusal = None
    if (choice.client is not None or choice.clients) and not has_own:
        option = "--clients" if choice.clients else "--client"
        refusal = problem(option, "a run whose clients have models of their own", Words("one without"))
    elif choice.client is not None and not 0 <= choice.client < size:
        refusal = problem("--client", f"a client's number in [0, {size - 1}]", choice.client)
    elif choice.model is not None and evaluated.models is None:
        refusal = problem("--model", "a run of several models", Words(f"params that are {kind.value}"))
    elif choice == ModelChoice() and not kind.is_judged and kind is not ParamsKind.START:
        options.append("the params as they are (--params)")
        refusal = problem("RUN", "one whose params are a model", Words(kind.value))
    if refusal is not None:
        alone = "Leave it out: all use the model."
        if kind is not ParamsKind.MODEL:
            alone = f"Its params are {kind.value} (--params)."
        hint = f"It has {', '.join(options)}." if options else alone
        raise ConfigError([f"{refusal} {hint}"])


def _own_models(experiment: Any, state: Any, params: Any, choice: ModelChoice) -> tuple[dict[str, Any], str]:
    """Returns the models that clients were judged by: of one client, or of all with a leading axis.

    They are made `BLOCK` clients at a time.

    Args:
      experiment: what `config.build` made of the run's config.
      state: the algorithm's state in the checkpoint.
      params: the algorithm's params of that state.
      choice: a client's own model, or those of all N clients.

    Returns: (NumPy arrays by name, what they are in words). An array has the shape of the parameter for one client, and
      [N, ...] for all, with `has_trained` [N] beside them where the algorithm knows it.

    Raises: ConfigError for models of more than `MOST_BYTES` together.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fedjax_sim import tree
    from fedjax_sim.metrics import owner_models

    evaluated, data = experiment.judged.evaluated, experiment.data
    how = {"personal": evaluated.personal, "adapt": evaluated.adapt, "owners": data.train}
    models = jax.jit(lambda state, params, ids: owner_models(params, state, ids, **how))
    wanted = np.arange(data.train.size) if choice.clients else np.array([choice.client])
    one_client = jax.eval_shape(models, state, params, jax.ShapeDtypeStruct((1,), jnp.int32))
    num_bytes = len(wanted) * tree.num_bytes(one_client)
    if num_bytes > MOST_BYTES:
        size_in_words = Words(f"{len(wanted):,} models of {num_bytes:,} bytes together")
        rule = f"models of at most {MOST_BYTES:,} bytes"
        raise ConfigError([problem("--clients", rule, size_in_words, "Take --client ID.")])
    blocks = [wanted[i : i + BLOCK].astype(np.int32) for i in range(0, len(wanted), BLOCK)]
    parts = [jax.device_get(models(state, params, ids)) for ids in blocks]
    stacked = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    trained = None
    if evaluated.has_trained is not None:
        trained = np.concatenate([np.asarray(evaluated.has_trained(state, ids)) for ids in blocks])
    if choice.clients:
        named = _by_name(stacked) | ({} if trained is None else {"has_trained": trained})
        untrained = "" if trained is None or trained.all() else f", of whom {(~trained).sum():,} have not trained"
        return named, f"the own models of {len(wanted):,} clients{untrained}, row i client i's"
    name = "" if data.client_names is None else f" ({data.client_names[choice.client]})"
    words = f"the own model of client {choice.client}{name}"
    if trained is not None and not trained[0]:
        words += ", which has not trained: the model that it would begin with"
    return _by_name(jax.tree.map(lambda x: x[0], stacked)), words


def _one_of_several(experiment: Any, state: Any, number: int) -> tuple[dict[str, Any], str]:
    """Returns one of the server's models."""
    import jax

    models, count = jax.device_get(experiment.judged.evaluated.models(state))
    if not 0 <= number < int(count):
        raise ConfigError([problem("--model", f"a model's number in [0, {int(count) - 1}]", number)])
    return _by_name(jax.tree.map(lambda x: x[number], models)), f"model {number} of {int(count)}"


def _by_name(params: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree as NumPy arrays by their paths, such as "hidden_0/kernel"."""
    import jax
    import numpy as np

    named = {
        "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path): x
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    return {name or "params": np.asarray(x) for name, x in named.items()}
