"""Errors that a user can mend.

A `UserError` carries one complete message: where, what was found, what was expected, the remedy. The scripts print it
without a traceback and exit with its code; every other exception is a defect of the program and keeps its traceback.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave: data, files, folders. The scripts exit with code 1."""

    exit_code = 1


class ConfigError(UserError):
    """A mistake in flags, hyperparameters or a configuration YAML. The scripts exit with code 2."""

    exit_code = 2


class Diverged(UserError):
    """The loss has stopped being finite, step after step."""


class Interrupted(Exception):
    """The run was stopped on request, after its checkpoint was written: no failure.

    Attributes:
        exit_code: 128 + the signal, as shells have it.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + (number or signal.SIGTERM)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest of `choices`, or "" where none is close."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
