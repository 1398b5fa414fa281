"""Tells a user's errors, of which a command shows the text alone, from bugs, which are shown with a traceback."""

from __future__ import annotations

from fedjax_sim.config.value_kinds import ConfigError


def is_users_error(error: BaseException) -> bool:
    """Returns whether an error says what is wrong with a config or with an argument.

    >>> is_users_error(ConfigError(["seed: expected an integer, got 'x'."])), is_users_error(ValueError("x"))
    (True, False)
    """
    if isinstance(error, ConfigError):
        return True
    from fedjax_sim.validate import InvalidArgument  # imports JAX, which a wrong config need not wait for

    return isinstance(error, InvalidArgument)
