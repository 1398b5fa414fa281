"""Implements `fedjax-sim account`, `calibrate` and `audit`.

They print the epsilon of a mechanism, the noise for a budget, and an empirical lower bound of epsilon.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from fedjax_sim.command.completion import example_names
from fedjax_sim.command.errors import is_users_error
from fedjax_sim.command.folders import check_output
from fedjax_sim.command.options import OwnModules
from fedjax_sim.config.value_kinds import ConfigError
from fedjax_sim.running.environment import prepare
from fedjax_sim.text.bounds import shown_down

FIGURES = (".png", ".svg", ".pdf")  # kinds of the figure of an audit

ConfigArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG.toml | EXAMPLE]",
        help="A run's config, in place of the options below.",
        autocompletion=example_names,
    ),
]
SettingsOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="As for run; implies a config.")
]
WithoutOption = Annotated[list[str] | None, typer.Option("--unset", metavar="a.b", help="As for run.")]
PopulationOption = Annotated[int | None, typer.Option("--population", "-N", help="Clients.")]
CohortOption = Annotated[float | None, typer.Option("--cohort", "-m", help="Clients in a round; the expected number.")]
RoundsOption = Annotated[int | None, typer.Option("--rounds", "-T", help="By default the config's, else 1.")]
DeltaOption = Annotated[float | None, typer.Option(help="By default N^-1.1.")]
SchemeOption = Annotated[str, typer.Option(help="poisson, truncated_poisson, uniform (exactly m) or full.")]
SlotsOption = Annotated[int | None, typer.Option(help="Most clients of a truncated_poisson cohort.")]
PlaceOption = Annotated[str, typer.Option(help="central, distributed or local noise.")]
AdjacencyOption = Annotated[str | None, typer.Option(help="add_or_remove_one, replace_one or zero_out.")]
ClipNormOption = Annotated[float, typer.Option(help="Largest norm of a message.")]
NoiseCohortOption = Annotated[
    int | None, typer.Option(help="Account for cohorts of this size, simulated by small ones.")
]
AccountantOption = Annotated[str, typer.Option(help="best, pld or rdp.")]
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def account(
    context: typer.Context,
    config: ConfigArgument = None,
    settings: SettingsOption = None,
    without: WithoutOption = None,
    own_modules: OwnModules = None,
    *,
    population: PopulationOption = None,
    cohort: CohortOption = None,
    noise_multiplier: Annotated[
        float | None, typer.Option("--noise-multiplier", "-z", help="Standard deviation of the noise / clip norm.")
    ] = None,
    rounds: RoundsOption = None,
    delta: DeltaOption = None,
    scheme: SchemeOption = "poisson",
    num_slots: SlotsOption = None,
    place: PlaceOption = "central",
    adjacency: AdjacencyOption = None,
    clip_norm: ClipNormOption = 1.0,
    noise_cohort_size: NoiseCohortOption = None,
    accountant: AccountantOption = "best",
    as_json: AsJsonOption = False,
) -> None:
    """Show the epsilon of a config's rounds, or of a mechanism given by options, with all that it assumes."""

    def answer():
        from fedjax_sim.privacy.commands import account_report

        files = (config, settings, without, own_modules)
        options = {
            "scheme": scheme, "num_slots": num_slots, "place": place, "adjacency": adjacency, "clip_norm": clip_norm,
            "noise_cohort_size": noise_cohort_size, "noise_multiplier": noise_multiplier,
        }  # fmt: skip
        sizes = {"population": population, "cohort": cohort, "rounds": rounds, "delta": delta}
        mechanism, run_options, _ = _mechanism(context, files, options, **sizes)
        if "mechanism" not in mechanism and noise_multiplier is None:
            raise ConfigError(["--noise-multiplier: expected a number, got nothing. Write -z Z, or give a config."])
        return account_report(**mechanism, **run_options, accountant=accountant)

    _print(answer, as_json)


def calibrate(
    context: typer.Context,
    config: ConfigArgument = None,
    settings: SettingsOption = None,
    without: WithoutOption = None,
    own_modules: OwnModules = None,
    *,
    epsilon: Annotated[float, typer.Option("--epsilon", "-e", help="The budget.")] = 1.0,
    population: PopulationOption = None,
    cohort: CohortOption = None,
    rounds: RoundsOption = None,
    delta: DeltaOption = None,
    scheme: SchemeOption = "poisson",
    num_slots: SlotsOption = None,
    place: PlaceOption = "central",
    adjacency: AdjacencyOption = None,
    clip_norm: ClipNormOption = 1.0,
    noise_cohort_size: NoiseCohortOption = None,
    accountant: AccountantOption = "best",
    table: Annotated[bool, typer.Option("--table", help="Central, distributed and local noise side by side.")] = False,
    as_json: AsJsonOption = False,
) -> None:
    """Show the smallest noise multiplier whose epsilon does not exceed a budget."""

    def answer():
        from fedjax_sim.privacy.commands import calibrate_report

        files = (config, settings, without, own_modules)
        options = {
            "scheme": scheme, "num_slots": num_slots, "place": place, "adjacency": adjacency, "clip_norm": clip_norm,
            "noise_cohort_size": noise_cohort_size,
        }  # fmt: skip
        sizes = {"population": population, "cohort": cohort, "rounds": rounds, "delta": delta}
        mechanism, run_options, noise_of_config = _mechanism(context, files, options, **sizes)
        if table and getattr(mechanism.get("mechanism"), "unit", "client") == "record":
            raise ConfigError(
                ["--table: expected none beside a config that hides records, got one. It compares noise for clients."]
            )
        report = calibrate_report(epsilon=epsilon, **mechanism, **run_options, accountant=accountant, table=table)
        if noise_of_config is None:
            return report
        noise_settings = noise_of_config.settings_for(epsilon, report.fields, run_options, accountant)
        how = "No single option of this config sets its noise."
        for path, value in noise_settings.items():
            of_part, _, name = path.rpartition(".")
            how = f"In the config: {name} = {value!r} in [{of_part}], or --set {path}={value!r}."
        return f"{how}\n\n{report.text}", {"settings": noise_settings} | report.fields

    _print(answer, as_json)


def audit(
    context: typer.Context,
    config: ConfigArgument = None,
    settings: SettingsOption = None,
    without: WithoutOption = None,
    own_modules: OwnModules = None,
    *,
    noise_multiplier: Annotated[float, typer.Option("--noise-multiplier", "-z", help="Without a config.")] = 1.0,
    clip_norm: ClipNormOption = 1.0,
    sampling_rate: Annotated[float, typer.Option("--rate", "-q", help="Poisson; without a config.")] = 1.0,
    num_rounds: Annotated[int, typer.Option("--rounds", "-T", help="Of each audited run.")] = 1,
    delta: Annotated[float, typer.Option(help="At which epsilon is bounded.")] = 1e-5,
    num_releases: Annotated[int, typer.Option("--releases", help="Audited runs, half of them with a canary.")] = 10**6,
    confidence: Annotated[float, typer.Option(help="Of the interval.")] = 0.99,
    length: Annotated[float, typer.Option(help="Of the canary's update before it is clipped, in clip norms.")] = 10.0,
    num_canaries: Annotated[int, typer.Option("--canaries", help="Of one further run; 0 for none.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of all random draws.")] = 0,
    figure: Annotated[Path | None, typer.Option(help="A figure of the scores: .png, .svg or .pdf.")] = None,
    as_json: AsJsonOption = False,
) -> None:
    """Train with a canary and without, many times, and bound the actual epsilon from below."""

    def answer():
        if figure is not None:
            check_output("--figure", figure, FIGURES)
        prepare()
        from fedjax_sim.instruments import audit_command

        options = {
            "num_rounds": num_rounds, "delta": delta, "num_releases": num_releases, "confidence": confidence,
            "length": length, "seed": seed, "figure": figure and str(figure),
        }  # fmt: skip
        if any(files := (config, settings, without, own_modules)):
            _none_beside_a_config(context, "noise_multiplier", "clip_norm", "sampling_rate", "num_canaries")
            return audit_command(options, _experiment(*files)[0].algorithm)
        mechanism = {"noise_multiplier": noise_multiplier, "clip_norm": clip_norm, "sampling_rate": sampling_rate}
        return audit_command(options | mechanism | {"num_canaries": num_canaries})

    _print(answer, as_json)


PRIVACY_COMMANDS = (account, calibrate, audit)


def _experiment(
    config: Path | None, settings: list[str] | None, without: list[str] | None, own_modules: list[str] | None
) -> tuple[Any, Any]:
    """Returns (the experiment that a config describes, the config)."""
    from fedjax_sim.config import registry
    from fedjax_sim.config.document import load

    registry.admit(own_modules or [])
    loaded = load(config, settings or [], without or [])
    prepare()
    from fedjax_sim.config.build import build

    with loaded.arithmetic():
        return build(loaded), loaded


def _none_beside_a_config(context: typer.Context, *names: str) -> None:
    """Refuses options of this command that a config states itself, and that would be ignored.

    Raises: ConfigError if such an option is on the command line.
    """
    # The command line is asked for its source, since options have defaults.
    for option in context.command.params:
        source = context.get_parameter_source(option.name) if option.name in names else None
        if source is not None and source.name == "COMMANDLINE":
            value = context.params[option.name]
            raise ConfigError(
                [f"{option.opts[0]}: expected none beside a config, got {value}. Set it there, or by --set."]
            )


class _NoiseOfConfig(NamedTuple):
    """A config whose parts add noise, and the experiment that it describes."""

    loaded: Any
    experiment: Any
    adjacency: str | None

    def mechanism(self, changes: Mapping[str, float] | None = None) -> Any:
        """Returns the mechanism of the config with some options changed, over the same data; None without noise.

        Args:
          changes: values by the option's path; None: the config as it is.
        """
        from fedjax_sim.privacy import mechanism_of
        from fedjax_sim.running.privacy_ledger import message_dimension

        experiment = self.experiment if not changes else self._changed(changes)
        clients = experiment.data.train
        # Of an algorithm that does not state its parts, neither noise nor messages are known.
        is_known = experiment.algorithm.parts is not None
        dimension = message_dimension(experiment.algorithm, experiment.params, clients) if is_known else None
        return mechanism_of(experiment.algorithm, adjacency=self.adjacency, dimension=dimension, population=clients)

    def _changed(self, changes: Mapping[str, float]) -> Any:
        """Returns the experiment of the config with some options changed, over the same data and under the same plan.

        Args:
          changes: values by the option's path, such as {"transform.gaussian_mechanism.noise_multiplier": 1.5}.
        """
        from fedjax_sim.config.build import Builder
        from fedjax_sim.config.document import Config

        data = self.experiment.data

        class SameData(Builder):
            def data(self) -> Any:
                return data

        tables = self.loaded.resolved()
        for path, value in changes.items():
            *names, last = path.split(".")
            table = tables
            for name in names:
                table = table[name]
            table[last] = value
        with self.loaded.arithmetic():
            return SameData(Config(tables).planned(self.experiment.plan)).experiment()

    def settings_for(
        self, budget: float, report: Mapping[str, Any], run: Mapping[str, Any], accountant: str
    ) -> dict[str, float]:
        """Returns the options, by their paths, with which the config spends at most the budget; {} if none is found.

        The noise of a config is set by the option on which its mechanism's noise depends, such as the noise multiplier
        of a transform, or the epsilon of one message. What the changed config spends is accounted for again.

        Args:
          budget: epsilon > 0.
          report: the fields of `calibrate_report`.
          run: {"rounds", "delta"}.
          accountant: as in `account`.

        Guarantees: the config with these options spends at most the budget, and more with a little less noise
          (tests/command/test_privacy.py::test_the_line_for_a_config).
        """
        from fedjax_sim import tree
        from fedjax_sim.privacy import account
        from fedjax_sim.privacy.calibration import least_multiplier

        z = report["noise_multiplier"]
        stated = self.mechanism().noise_multiplier

        def spent(changes: Mapping[str, float]) -> float:
            return account(self.mechanism(changes), run["rounds"], run["delta"], accountant=accountant).epsilon

        for path, value in tree.dotted(self.loaded.resolved()).items():
            if not isinstance(value, float) or path.partition(".")[0] not in ("algorithm", "transform"):
                continue
            try:
                doubled = self.mechanism({path: 2 * value}).noise_multiplier
                if doubled == stated:
                    continue
                option = _itself if doubled > stated else _inverse
                changed_mechanism = self.mechanism({path: option(z)})
                # Elsewhere the noise does not follow one option alone, or costs a little more on another grid.
                is_same_noise = math.isclose(changed_mechanism.noise_multiplier, z, rel_tol=1e-4)
                is_direct = is_same_noise and spent({path: option(z)}) <= budget
                least = z if is_direct else least_multiplier(lambda z: spent({path: option(z)}), budget)  # noqa: B023
            except (ConfigError, TypeError, ValueError):
                continue  # the option cannot have such values
            return {path: option(least)}
        return {}


def _itself(multiplier: float) -> float:
    """Returns a noise multiplier as the option that is one."""
    return multiplier


def _inverse(multiplier: float) -> float:
    """Returns the epsilon of a message, as the option whose noise has no multiplier; rounded down in five digits."""
    return float(shown_down(1 / multiplier, 5).replace(",", ""))


def _mechanism(
    context: typer.Context,
    files: tuple,
    options: Mapping[str, Any],
    *,
    population: int | None,
    cohort: float | None,
    rounds: int | None,
    delta: float | None,
) -> tuple[dict[str, Any], dict[str, Any], _NoiseOfConfig | None]:
    """Returns (the mechanism as `privacy.commands` takes it, {"rounds", "delta"}, the config's noise), from either.

    The config's noise is None where options state the mechanism.

    Args:
      context: the command, whose options must not contradict a config.
      files: the config, its settings, its left out options and own modules, as `_experiment` takes them.
      options: options of the mechanism by the name of the argument, but for those below.
      population: N, the number of clients; None: a config states it.
      cohort: m, the number of clients in a round, or the expected number; None: a config states it.
      rounds: T; None: those of the config, or 1 without a config.
      delta: in (0, 1); None: that of the config, or else `default_delta`.

    Raises: ConfigError for a config without noise, and for missing or contradicting options.
    """
    from fedjax_sim.running.privacy_ledger import default_delta

    if any(files):
        _none_beside_a_config(context, "population", "cohort", *(name for name in options if name != "adjacency"))
        from fedjax_sim.running.fingerprint import is_opaque, program_digest
        from fedjax_sim.running.privacy_ledger import OPAQUE_PROGRAM

        experiment, loaded = _experiment(*files)
        run = loaded.resolved()["run"]
        noise = _NoiseOfConfig(loaded, experiment, options["adjacency"])
        mechanism = noise.mechanism()
        if mechanism is None:
            hint = "See fedjax-sim list transform, and, to hide records, algorithm.name = record_private_fedavg."
            raise ConfigError([f"transform: expected a part with noise in the config, got none. {hint}"])
        delta = run["delta"] if delta is None else delta
        # Tracing a round finds what a run would refuse only then.
        with loaded.arithmetic():
            digest = program_digest(experiment.algorithm, experiment.params, experiment.data.train)
        arguments: dict[str, Any] = {"mechanism": mechanism, "notes": [OPAQUE_PROGRAM] * is_opaque(digest)}
        if delta is None:
            # If clients are federations, the statement for the clients inside has a delta by their own number.
            members = mechanism.of_members()
            if members is not None:
                arguments["member_delta"] = default_delta(members.num_units or mechanism.num_units)
            delta = default_delta(mechanism.num_units)
        return arguments, {"rounds": run["rounds"] if rounds is None else rounds, "delta": delta}, noise
    if population is None or cohort is None:
        raise ConfigError(["--population, --cohort: expected both, got less. Write -N N -m M, or give a config."])
    if not math.isfinite(cohort):
        raise ConfigError([f"--cohort: expected a finite number, got {cohort}."])
    # Schemes with a fixed size take an integer, Poisson sampling takes any expected number.
    sizes = {"population_size": population, "cohort_size": int(cohort) if cohort == int(cohort) else cohort}
    stated = {name: value for name, value in options.items() if value is not None}
    return (
        stated | sizes,
        {
            "rounds": 1 if rounds is None else rounds,
            "delta": default_delta(population) if delta is None else delta,
        },
        None,
    )


def _print(answer: Callable[[], tuple[str, dict]], as_json: bool) -> None:
    """Prints an answer's text, or its fields as JSON; exits with 2 for wrong input, with 1 for a missing package."""

    try:
        text, fields = answer()
    except (ConfigError, TypeError, ValueError) as error:
        if not is_users_error(error):
            raise
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (ImportError, OSError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(json.dumps(fields, indent=2) if as_json else text)
