"""Suggests what a user meant by a word that no config has: the word of another library, or an option of a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from fedjax_sim.config import registry
from fedjax_sim.config.value_kinds import nearest_word

# Words that papers and other libraries use for an option or a table -> the config's word.
SYNONYMS = {
    "batch": "batch_size",
    "client_lr": "learning_rate",
    "clients": "num_clients",
    "clients_per_round": "cohort_size",
    "dataset": "data",
    "datasets": "data",
    "epochs": "num_epochs",
    "lam": "coefficient",
    "lambda": "coefficient",
    "local_epochs": "num_epochs",
    "local_steps": "num_steps",
    "lr": "learning_rate",
    "mu": "coefficient",
    "num_rounds": "rounds",
    "optimizer": "client_optimizer",
    "optimizers": "client_optimizer",
    "proximal_mu": "coefficient",
    "random_seed": "seed",
    "server_lr": "server_learning_rate",
    "step_size": "learning_rate",
    "steps": "num_steps",
    "strategy": "algorithm",
}


# If more parts have an option, their names say nothing about which of them is meant.
MOST_HOLDERS = 4
HARDWARE = ("cpu", "cuda", "device", "gpu", "gpus", "tpu")


def canonical(word: str) -> str:
    """Returns the config's word for a word that people write in its place; other words are returned unchanged.

    >>> canonical("lr"), canonical("Batch-Size")
    ('learning_rate', 'batch_size')
    """
    word = word.lower().replace("-", "_")
    return SYNONYMS.get(word, word)


def homes(option: str, tables: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Returns the paths at which a config has an option.

    Args:
      option: the option's name, such as "rounds".
      tables: the names of each table's options, such as those of the default run.

    >>> homes("rounds", {"run": ["rounds"], "data": ["num_clients"]})
    ('run.rounds',)
    """
    return ("seed",) if option == "seed" else tuple(f"{name}.{option}" for name, has in tables.items() if option in has)


def unlike_a_config(word: str) -> str:
    """Explains how to do what no option of a config does, such as to choose the hardware; "" for other words.

    >>> unlike_a_config("gpu").partition(":")[0]
    'A run takes the devices that JAX sees'
    """
    if word.lower() not in HARDWARE:
        return ""
    return (
        "A run takes the devices that JAX sees: JAX_PLATFORMS=cpu, cuda or tpu in the environment chooses their kind, "
        "and run.devices=N takes N of them."
    )


def suggestion(
    path: str,
    options: Collection[str],
    tables: Mapping[str, Collection[str]],
    refused: Mapping[str, Collection[str]] = MappingProxyType({}),
    algorithm: str = "",
) -> str:
    """Returns what to write in the place of an unknown key; "" where nothing is similar.

    Args:
      path: the path of the key, such as "algorithm.lr".
      options: the options that its table has.
      tables: as in `homes`.
      refused: tables that the algorithm does not take, and their options.
      algorithm: the algorithm's name.

    >>> tables = {"client_optimizer": ["learning_rate"]}
    >>> suggestion("client_optimizer.lr", ["learning_rate"], tables), suggestion("algorithm.lr", ["num_steps"], tables)
    ("Did you mean 'learning_rate'?", 'Write client_optimizer.learning_rate.')
    >>> suggestion("algorithm.num_stps", ["num_steps"], tables)
    "Did you mean 'num_steps'?"
    """
    key = path.rpartition(".")[2]
    word = canonical(key)
    if word in options:
        return f"Did you mean {word!r}?"
    elsewhere = [home for home in homes(word, tables) if home != path]
    if elsewhere:
        return f"Write {' or '.join(elsewhere)}."
    if out_of_reach := homes(word, refused):
        holders = " and ".join(f"[{home.partition('.')[0]}]" for home in out_of_reach)
        return f"It is an option of {holders}, and {algorithm} takes no such table."
    return (
        unlike_a_config(key) or _holders(path) or " ".join(filter(None, (nearest_word(key, options), _left_over(path))))
    )


def _left_over(path: str) -> str:
    """Says how to leave out an option that other parts of the same table have; "" if none has it.

    Such an option is in a file whose part was changed by its name alone.
    """
    name, _, option = path.partition(".")
    if name not in registry.TABLES:
        return ""
    if not any(option in part_facts.options for part_facts in registry.parts_of_table(name).values()):
        return ""
    return f"It is an option of others in [{name}]. Leave it out: --unset {path}."


def _holders(path: str) -> str:
    """Names the few other parts of the same table, or its wrappers, that have the option; "" for none, or for many."""
    name, _, option = path.partition(".")
    if name not in registry.TABLES:
        return ""
    parts = [part for part, part_facts in registry.parts_of_table(name).items() if option in part_facts.options]
    wrappers = [
        f"[{name}.{part}]" for part, part_facts in registry.wrappers(name).items() if option in part_facts.options
    ]
    if len(parts) > MOST_HOLDERS:
        return ""
    if parts:
        return f"It is an option of {', '.join(parts)}: set {name}.name, or leave it out: --unset {path}."
    return f"It is an option of {', '.join(wrappers)}." if wrappers else ""
