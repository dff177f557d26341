"""Ranks as real processes: torchrun with gloo on loopback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.utils.ranks.world import World
from tests.system.launch import Outcome, torchrun
from tests.system.rank_programs import messages

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("rank_programs.py")
Lines = Callable[[str], list[dict[str, Any]]]


def read(outcome: Outcome, program: str) -> list[dict[str, Any]]:
    assert outcome.code == 0, outcome.said
    lines = [json.loads(line) for line in outcome.out.splitlines() if line.startswith("{")]
    return sorted((line for line in lines if line["program"] == program), key=lambda line: line["rank"])


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Return the output of two ranks for a program of rank_programs.py; one job runs them all."""
    programs = ("foreign_threads", "messages", "statistics")
    outcome = torchrun(PROGRAM, *programs, env={"OMP_NUM_THREADS": "16"})
    return lambda program: read(outcome, program)


def test_control_messages(said: Lines) -> None:
    lines = said("messages")
    assert [line["local"] for line in lines] == [[0, 2, 0], [1, 2, 0]]
    for line in lines:
        assert line["broadcast"] == {"from": 0}
        assert line["gathered"] == [0, 2]
        assert line["on_main"] == (["", "x"] if line["rank"] == 0 else [])
        assert line["first"] == "rank 0"
        assert line["main"] == 100
        assert line["sum"] == 3
        assert line["later"] == 10
        assert line["threads"][0] == min(16, line["threads"][1]), "threads without a processor"


def test_collectives_are_freed_by_the_calling_thread(said: Lines) -> None:
    """Otherwise a worker forked meanwhile may never start; see utils/ranks/world.py."""
    assert [line["entered"] for line in said("foreign_threads")] == [0, 0]


def test_a_single_process_needs_no_group() -> None:
    found = messages(World())
    assert (found["gathered"], found["on_main"], found["main"]) == ([0], [""], 100)


def test_running_statistics_become_the_mean_over_the_ranks(said: Lines) -> None:
    first, second = said("statistics")
    expected = [(a + b) / 2 for a, b in zip(first["own"], second["own"], strict=True)]
    assert first["mean"] == second["mean"] == pytest.approx(expected, rel=1e-5)
