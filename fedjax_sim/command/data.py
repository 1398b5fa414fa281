"""Implements `fedjax-sim data`: the clients of a config, their sizes and labels, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_sim.command.completion import example_names
from fedjax_sim.command.errors import is_users_error
from fedjax_sim.command.folders import check_output
from fedjax_sim.command.options import OwnModules, Settings, Without
from fedjax_sim.running import terminal


def data(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.toml | EXAMPLE]", help="A run's config; its [data] is read.", autocompletion=example_names
        ),
    ] = None,
    settings: Settings = None,
    without: Without = None,
    own_modules: OwnModules = None,
    out: Annotated[
        Path | None, typer.Option(help="Also draw the labels and sizes of 24 clients, as data.png or data.svg.")
    ] = None,
) -> None:
    """Show the clients of a config: how many there are, their sizes, and how their labels differ."""
    from fedjax_sim.config import registry
    from fedjax_sim.config.document import ConfigError, load
    from fedjax_sim.running.environment import prepare

    try:
        if out is not None:
            check_output("--out", out, (".png", ".svg"))
        registry.admit(own_modules or [])
        loaded = load(config, settings or [], without or [])
        prepare()
        from fedjax_sim.config.build import Builder
        from fedjax_sim.population.describe import describe

        builder = Builder(loaded)
        federated = builder.data()
        builder.stop()
        about = describe(federated)
        lines = [*_facts(federated, about), *_label_lines(federated)]
        if out is not None:
            _draw(about, out)
    except (ConfigError, TypeError, ValueError) as error:
        if not is_users_error(error):
            raise
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (ImportError, OSError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error
    _show(lines)
    if out is not None:
        typer.echo(str(out))


def _facts(federated: Any, about: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns lines (name, text) on clients, examples and shapes.

    Args:
      federated: a `FederatedData`.
      about: what `population.describe` says of it. It has no numbers of examples for more clients than
        `MAX_VISITED`.
    """
    import jax

    from fedjax_sim.population.datasets.quantities import names_in_words

    lines = [("data", about["name"]), ("task", federated.task), ("clients", f"{about['num_clients']:,}")]
    if "num_examples_total" in about:
        lines.append(("examples at clients", f"{about['num_examples_total']:,}"))
        sizes = about["examples_quantiles"]
        texts = [f"{sizes[name]:,.6g}" for name in ("min", "q25", "median", "q75", "max")]
        lines.append(("examples of a client", f"{texts[0]} to {texts[4]}; quartiles {', '.join(texts[1:4])}"))
    lines.append(("test examples", f"{len(jax.tree.leaves(federated.test)[0]):,}"))
    held_out = 0 if federated.held_out is None else federated.held_out.size
    lines.append(("held-out clients", f"{held_out:,}"))
    lines.append(("an example", f"shape {tuple(federated.input_shape)}"))
    lines += [("poisoned", words) for words in about.get("poisons", ())]
    if names := federated.client_names:
        lines.append(("names of clients", names_in_words(names)))
    lines += [("columns", words) for words in about.get("columns", ())]
    lines += [("changed", words) for words in about.get("notes", ())]
    lines += [("learnt from all rows", words) for words in about.get("learned", ())]
    lines += [("warning", words) for words in about.get("warnings", ())]
    return lines


def _label_lines(federated: Any) -> list[tuple[str, str]]:
    """Returns lines (name, text) on the clients' labels.

    With n_il examples of label l at client i, the share of label l is 100 sum_i n_il / sum_ik n_ik percent.

    Args:
      federated: a `FederatedData`.

    Returns: [] unless the task has classes, and for more clients than `MAX_VISITED`.
    """
    from fedjax_sim.metrics import label_counts, label_heterogeneity
    from fedjax_sim.population.describe import MAX_VISITED

    if federated.task not in ("binary", "classification") or federated.train.size > MAX_VISITED:
        return []
    counts = label_counts(federated.train, num_labels=max(federated.num_outputs, 2))
    measures = label_heterogeneity(counts)
    shares = 100 * counts.sum(axis=0) / counts.sum()
    held_labels = (counts > 0).sum(axis=1)
    return [
        ("labels", f"{len(shares)}, with {shares.min():.3g} to {shares.max():.3g} % of the examples each"),
        ("labels of a client", f"{held_labels.min()} to {held_labels.max()}, {held_labels.mean():.3g} on average"),
        ("effective number of labels of a client", f"{measures['labels_per_client']:.4g}"),
        ("total variation from all labels", f"{measures['total_variation']:.4g}, from 0 (alike) to 1"),
        ("Jensen-Shannon divergence", f"{measures['jensen_shannon']:.4g} nats"),
    ]


def _draw(about: dict[str, Any], out: Path) -> None:
    """Draws the labels and sizes of up to 24 clients.

    Args:
      about: what `population.describe` says of the data.
      out: the file, whose suffix says in which format; the folder around it is made if it is absent.

    Raises: ConfigError for data without classes.
    """
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.config.value_kinds import problem
    from fedjax_sim.report.axes import image
    from fedjax_sim.report.plots import label_mix
    from fedjax_sim.running.files import write_atomically

    if "label_counts" not in about:
        raise ConfigError([problem("--out", "a task with classes, whose labels can be drawn", about["name"])])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, [image(label_mix(about), out.suffix[1:])])


def _show(lines: list[tuple[str, str]]) -> None:
    """Prints lines (name, text) as a table."""
    grid = terminal.grid(show_header=False)
    for name, text in lines:
        grid.add_row(name, text)
    terminal.console(soft_wrap=True).print(grid)
