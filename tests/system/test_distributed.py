"""Ranks as real processes: torchrun with gloo on loopback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.system.launch import Outcome, run_python, torchrun
from tests.system.tiny import make_data

PROGRAM = Path(__file__).with_name("rank_programs.py")


def said(outcome: Outcome) -> list[dict[str, Any]]:
    """The ranks' lines, by rank."""
    assert outcome.code == 0, outcome.said
    lines = [json.loads(line) for line in outcome.out.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def test_control_messages() -> None:
    lines = said(torchrun(PROGRAM, "messages", ranks=3, env={"OMP_NUM_THREADS": "16"}))
    assert [line["local"] for line in lines] == [[0, 3, 0], [1, 3, 0], [2, 3, 0]]
    for line in lines:
        assert line["broadcast"] == {"from": 0}
        assert line["gathered"] == [0, 2, 4]
        assert line["on_main"] == (["", "x", "xx"] if line["rank"] == 0 else [])
        assert line["first"] == "rank 0"
        assert line["main"] == 100
        assert line["sum"] == 6
        assert line["later"] == 30
        assert line["threads"][0] == min(16, line["threads"][1]), "threads without a processor"


def test_collectives_are_freed_by_the_thread_that_asked_for_them() -> None:
    """Else a worker that is forked meanwhile may never begin; see utils/ranks/collectives.py."""
    for line in said(torchrun(PROGRAM, "foreign_threads", ranks=2)):
        assert line["entered"] == 0


def test_messages_leave_no_memory_behind() -> None:
    for line in said(torchrun(PROGRAM, "freed_messages", ranks=2)):
        assert line["freed"] == [True] * 5  # one of the broadcast, one and two of the exchange, one of the gather


def test_a_single_process_needs_no_group() -> None:
    (line,) = said(run_python(PROGRAM, "messages"))
    assert line["gathered"] == [0]
    assert line["on_main"] == [""]
    assert line["main"] == 100


def test_the_others_wait_for_the_first_rank_of_the_node(tmp_path: Path) -> None:
    lines = said(torchrun(PROGRAM, "zero_first", str(tmp_path)))
    assert [line["found"] for line in lines] == [False, True]


@pytest.mark.parametrize(
    ("program", "message"), [("zero_first_fails", "the data is not here"), ("main_fails", "folder is read-only")]
)
def test_a_mistake_on_the_first_rank_lets_the_others_go_and_is_reported_once(program: str, message: str) -> None:
    outcome = torchrun(PROGRAM, program, timeout=60)
    assert outcome.code != 0
    assert outcome.err.count(f"error: {message}") == 1, outcome.said
    assert "Traceback" not in outcome.err.split("ChildFailedError")[0].split("torch/distributed")[0], outcome.said


def test_a_defect_on_one_rank_ends_the_job_and_names_the_rank() -> None:
    outcome = torchrun(PROGRAM, "one_rank_raises", timeout=60)
    assert outcome.code != 0
    assert outcome.err.count("RuntimeError: boom in the loader") == 1, outcome.said
    assert "rank 1: Traceback" in outcome.err


@pytest.mark.parametrize("ranks", [2, 3])
def test_sync_bn_on_the_cpu_is_batch_norm_of_the_whole_batch(ranks: int) -> None:
    for line in said(torchrun(PROGRAM, "sync_bn", ranks=ranks)):
        assert line["off"] < 1e-5
        assert line["tracked"] == 1
        assert line["names"]


def test_running_statistics_become_the_mean_over_the_ranks() -> None:
    first, second = said(torchrun(PROGRAM, "statistics"))
    expected = [(a + b) / 2 for a, b in zip(first["own"], second["own"], strict=True)]
    assert first["mean"] == second["mean"] == pytest.approx(expected, rel=1e-5)


def test_an_image_is_decoded_once_for_all_ranks_and_workers_of_a_node(tmp_path: Path) -> None:
    data = make_data(tmp_path, train=600)
    lines = said(torchrun(PROGRAM, "decodes", str(data)))
    assert [line["samples"] for line in lines] == [300, 300]
    # At best 600 and the 128 of the first windows; each of four processes for itself would decode more than 1,500.
    assert sum(line["decoded"] for line in lines) < 1000, lines
