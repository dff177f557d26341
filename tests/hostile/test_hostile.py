"""A few cases of every hostile subject; `make hostile` runs them all."""

from __future__ import annotations

import mmap
import random
import sys
from pathlib import Path

import pytest

from tessera.utils.errors import UserError
from tests.hostile.campaign import Outcome, Subject, run_cases, subject_names
from tests.hostile.expect import Message, checked, message_or_result
from tests.system.launch import run_command


@pytest.mark.slow
def test_a_few_cases_of_every_subject() -> None:
    done = run_command([sys.executable, "-m", "tests.hostile", "--fast"], timeout=900)
    assert done.code == 0, done.said
    assert all(f"\n{name} " in done.out for name in subject_names()), done.said


def outcome_of(trial: object, home: Path, **limits: float) -> Outcome:
    subject = Subject("made", trial, 1, 1, limits.get("time_limit_s", 60), 2**28)  # type: ignore[arg-type]
    (outcome,) = run_cases(subject, 0, [3], home, 1)
    assert list(home.iterdir()) == []
    return outcome


def test_a_case_that_is_well(tmp_path: Path) -> None:
    """It gets an empty folder, and the same random numbers each time."""

    def trial(rng: random.Random, folder: Path) -> str:
        assert folder.is_dir() and not list(folder.iterdir())
        return f"kind {rng.random()}"

    first = outcome_of(trial, tmp_path)
    assert first == outcome_of(trial, tmp_path) and first.kind.startswith("kind 0.") and not first.failure


def test_failures_are_found(tmp_path: Path) -> None:
    def raises(*_: object) -> str:
        print("said before")
        raise KeyError("lost")

    def prints(*_: object) -> str:
        print("\x1b[2J", flush=True)
        return "kind"

    def hangs(*_: object) -> str:
        while True:
            pass

    def eats(*_: object) -> str:  # new address space: malloc may hand out memory that an earlier test gave back to it
        return str(len(mmap.mmap(-1, 2**30)))

    def dies(*_: object) -> str:
        raise SystemExit(3)

    assert "KeyError: 'lost'" in outcome_of(raises, tmp_path).failure
    assert "printed raw" in outcome_of(prints, tmp_path).failure
    assert "hangs" in outcome_of(hangs, tmp_path, time_limit_s=1).failure
    assert "Cannot allocate memory" in outcome_of(eats, tmp_path).failure
    assert "SystemExit" in outcome_of(dies, tmp_path).failure


def test_what_a_message_may_be() -> None:
    def mistake() -> int:
        raise UserError("a.yaml:3: found 1, expected 2. Change it.")

    assert message_or_result(lambda: 5) == 5
    assert isinstance(message_or_result(mistake), Message)
    for text in ("a\x1b[2Jb", "x" * 1000, "a\n" * 20, "\ud800", "a\u202eb", "\r"):
        with pytest.raises(AssertionError):
            checked(text)
