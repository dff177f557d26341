"""Fixtures of the system's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system.launch import Command, Outcome


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a script's main in this process, as the command line would: much sooner done than a process of its own."""

    def run(main: Callable[[list[str]], int], *args: str) -> Outcome:
        capsys.readouterr()
        code = main(list(args))
        return Outcome(code, *capsys.readouterr())

    return run
