"""Adds a hint to the error for an unknown option of a command: the option of a config that was meant."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from typer.core import TyperCommand


@runtime_checkable
class _UnknownOption(Protocol):
    """The error for an unknown option. Typer exports no class for it, so it is known by what it has."""

    option_name: str
    message: str
    possibilities: Any


class Hinting(TyperCommand):
    """A command with `--set` that answers `--lr 0.1` with `--set client_optimizer.learning_rate=0.1`.

    Guarantees: the error for `--lr`, `--rounds`, `--epochs`, `--seed` and `--dataset` names the `--set` to write, and
    the error for an option like one of the command's own names that option
    (tests/command/test_hints.py::test_options_that_people_type).
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses arguments as typer does; the error for an unknown option gets a hint.

        Args:
          ctx: the command's context, as Click makes it.
          args: the words behind the command; the parser takes them out of this list.
        """
        typed_arguments = list(args)  # the parser takes words out of its own list
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            options = [option for parameter in self.params for option in parameter.opts]
            if (
                isinstance(error, _UnknownOption)
                and error.option_name not in options
                and "--set" in options
                and (hint := _hint(error.option_name, typed_arguments))
            ):
                error.message = f"No such option: {error.option_name}. {hint}"
                error.possibilities = None
            raise


def _hint(option: str, given: list[str]) -> str:
    """Returns what to write in the place of an option, with the value that follows it; "" if no config has such a word.

    Args:
      option: the option as it was typed, such as "--lr".
      given: the whole command line.
    """
    from fedjax_sim.config import registry
    from fedjax_sim.config.hints import canonical, homes, unlike_a_config
    from fedjax_sim.config.resolve import default_tables

    word = canonical(option.lstrip("-"))
    value = "..."
    for argument, following in zip(given, [*given[1:], "-"], strict=True):
        if argument.startswith(f"{option}="):
            value = argument.partition("=")[2]
        elif argument == option and not following.startswith("-"):
            value = following
    if word == "config":
        return "Write the file, or the example's name, without it."
    paths = (f"{word}.name",) if word in registry.TABLES else homes(word, default_tables())
    settings = " or ".join(f"--set {path}={value}" for path in paths)
    return f"Write {settings}." if paths else unlike_a_config(word)
