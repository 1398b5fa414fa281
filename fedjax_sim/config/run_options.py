"""The options of a config's table [run], with what each of them means."""

from __future__ import annotations

from typing import Literal

from fedjax_sim.config.signatures import INT32_MAX, Option
from fedjax_sim.config.value_kinds import integer_kind, number_kind

COUNT = integer_kind(1, INT32_MAX)
LANES_KIND = integer_kind(1, 1 << 16)
# Option of [run] -> the kind of its values, its default, and its meaning, which `fedjax-sim list run` prints.
RUN_TABLE = {
    "rounds": (COUNT, 100, "rounds of training"),
    "evaluate_every": (COUNT, 10, "rounds from one evaluation to the next"),
    "checkpoint_every": (
        COUNT | None,
        None,
        "rounds between checkpoints; none: after evaluations, at most one a second",
    ),
    "keep_checkpoints": (COUNT, 2, "how many of the newest checkpoints are kept"),
    "stop_when": (str | None, None, 'such as "test_accuracy >= 0.9" or "test_loss not lower for 5"'),
    "log": (list[Literal["tensorboard", "wandb", "mlflow"]] | None, None, "tools that get the records too"),
    "devices": (Literal["all"] | COUNT, "all", "how many of the devices that JAX sees take part"),
    "plan": (Literal["auto", "trial"], "auto", "how lanes are chosen; trial: the fastest of a short timed trial"),
    "lanes": (LANES_KIND | None, None, "clients vmapped at once; none: fitted to the cache"),
    "chunk": (LANES_KIND | None, None, "messages summed at once, in whole lanes; none: as many as lanes"),
    "nonfinite": (Literal["drop", "error"], "drop", "what becomes of a client whose message is not finite"),
    "delta": (
        number_kind(0, 1, open_low=True, open_high=True) | None,
        None,
        "delta at which epsilon is stated if a part adds noise; none: N^-1.1 for N clients or records",
    ),
    "evaluate_train": (Literal["all"] | COUNT | None, None, "clients whose training objective is evaluated"),
    "metrics": (
        list[str] | None,
        None,
        'metrics beside loss and accuracy, such as ["roc_auc", "f1_macro"] (`fedjax-sim list metrics`)',
    ),
    "personal_steps": (
        COUNT | None,
        None,
        "local steps on its own rows before a client's model is judged (`personal_*`); none: as the algorithm left it",
    ),
    "variance_probe": (
        integer_kind(2, INT32_MAX) | None,
        None,
        "clients that the variance budget trains at each evaluation",
    ),
    "arithmetic": (
        Literal["reproducible", "fast"],
        "reproducible",
        "reproducible: the same bits on any devices; fast: sums and rounding are the compiler's",
    ),
    "client_memory": (
        Literal["auto", "device", "disk"],
        "auto",
        "where clients' states are; auto: on disk if the devices are too small",
    ),
    "modules": (list[str] | None, None, "modules with parts outside of fedjax_sim; each also needs `--with` to run"),
    "progress": (bool, True, "whether a bar shows the rounds done"),
}
RUN = {name: Option(kind, default) for name, (kind, default, _) in RUN_TABLE.items()}
