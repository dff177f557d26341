"""Fixtures of the system tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system.launch import Command, Outcome


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command's main in this process, which is much faster than a new one."""

    def run(main: Callable[[list[str]], int], *args: str) -> Outcome:
        capsys.readouterr()
        code = main(list(args))
        return Outcome(code, *capsys.readouterr())

    return run
