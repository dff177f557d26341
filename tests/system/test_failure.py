"""Failures of one rank: the whole job ends soon, with one message that names the cause, and a whole checkpoint."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.utils.checkpoints.format import load_checkpoint
from tests.system.jobs import train
from tests.system.launch import ROOT, Outcome
from tests.system.tiny import flags, losses, make_data, tensors

pytestmark = pytest.mark.slow


STEPS = 4  # optimizer steps an epoch
END_S = 60.0  # from the moment that a failure is seen


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), train=8 * STEPS, val=4)


def fail(data: Path, folder: Path, fault: str, *more: str, env: dict[str, str] | None = None) -> Outcome:
    """Run two ranks, one of which fails after a few steps; check what is left."""
    args = flags(data, folder, "--epochs", "4", "--save-steps", "1", *more)
    outcome = train(folder, 2, *args, fault=fault, env=env)
    ended = time.time()
    assert outcome.code != 0, outcome.said
    struck = re.search(r"struck at ([\d.]+)", outcome.err)
    if struck:
        seen_after = float((env or {}).get("TESSERA_PEER_TIMEOUT", 0))
        assert ended - float(struck[1]) < END_S + seen_after, outcome.said
    assert "Best epoch" not in outcome.out
    last = folder / "exp" / "weights" / "last.pt"
    if last.exists():
        load_checkpoint(last)
    assert outcome.err.count(f"Resume with: uv run train.py --resume {last}") == last.exists(), outcome.said
    killed_writer = fault.startswith("0 ") and fault.endswith(" kill")  # the next start removes that file
    assert killed_writer or not list(folder.rglob("*.tmp"))
    return outcome


def reports(outcome: Outcome) -> list[str]:
    """Return the ranks that reported an error; torchrun's own traceback is none."""
    return re.findall(r"^rank (\d+): (?:Traceback|error)", outcome.err, re.MULTILINE)


@pytest.mark.parametrize("fault", ["1 loss 6 raise", "0 save 3 raise", "0 scan 1 raise"])
def test_a_rank_that_raises_ends_the_job_in_its_words(data: Path, tmp_path: Path, fault: str) -> None:
    outcome = fail(data, tmp_path, fault)
    assert outcome.err.count("RuntimeError: broken on purpose") == 1, outcome.said
    assert f"rank {fault[0]}: Traceback" in outcome.err, outcome.said
    assert reports(outcome) == [fault[0]], outcome.said


@pytest.mark.parametrize(("rank", "where"), [(0, "scan 1"), (1, "step 6")])
def test_a_killed_rank_is_named(data: Path, tmp_path: Path, rank: int, where: str) -> None:
    outcome = fail(data, tmp_path, f"{rank} {where} kill")
    found = re.findall(rf"rank {1 - rank}: error: rank {rank} on \S+ \(last: .*\) is gone", outcome.err)
    assert len(found) == 1, outcome.said
    assert reports(outcome) == [str(1 - rank)], outcome.said


@pytest.mark.parametrize("fault", ["1 step 6 stop", "0 scan 1 stop"])
def test_a_rank_that_does_not_answer_is_named(data: Path, tmp_path: Path, fault: str) -> None:
    outcome = fail(data, tmp_path, fault, env={"TESSERA_PEER_TIMEOUT": "5"})
    assert len(re.findall(rf"error: rank {fault[0]} on \S+ \(last: .*\) has not answered for", outcome.err)) == 1, (
        outcome.said
    )
    assert reports(outcome) == [str(1 - int(fault[0]))], outcome.said


def test_a_killed_loader_worker_ends_the_job(data: Path, tmp_path: Path) -> None:
    outcome = fail(data, tmp_path, "1 step 3 worker")
    assert reports(outcome) == ["1"], outcome.said
    assert outcome.err.count("error: a loader worker is gone") == 1, outcome.said
    assert "rank 1: Traceback" not in outcome.err, outcome.said


def test_a_control_timeout_names_who_is_missing(data: Path, tmp_path: Path) -> None:
    outcome = fail(data, tmp_path, "0 validation 1 sleep", env={"TESSERA_CONTROL_TIMEOUT": "5"})
    found = re.findall(r"error: control message \d+ has waited \d+ s .*rank (\d) on \S+ \(last: (.*?)\)", outcome.err)
    assert found == [("0", "validating epoch 0")], outcome.said


def test_ranks_that_differ_are_refused_with_what_differs(data: Path, tmp_path: Path) -> None:
    other = make_data(tmp_path / "other", train=24, val=4)
    hyp = tmp_path / "hyp.yaml"
    hyp.write_text((ROOT / "data" / "hyps" / "hyp.short.yaml").read_text())
    env = {"ARGS_OF_RANK_1": f"--data {other} --hyp {hyp}"}
    outcome = fail(data, tmp_path, "", "--hyp", "hyp.scratch-low.yaml", env=env)
    assert outcome.err.count("the ranks do not agree") == 1, outcome.said
    assert re.search(r"train data: 32 images, \w+ on rank 0; 24 images, \w+ on rank 1", outcome.err), outcome.said
    assert re.search(r"hyp \w+: \S+ on rank 0; \S+ on rank 1", outcome.err), outcome.said


def state(folder: Path, name: str = "last.pt") -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "exp" / "weights" / name, weights_only=True)
    return loaded


def test_a_step_that_is_nan_on_one_rank_is_skipped_by_all(data: Path, tmp_path: Path) -> None:
    args = ("--epochs", "2")
    before, after = tmp_path / "before", tmp_path / "after"
    train(before, 2, *flags(data, before, *args), fault=f"0 step {STEPS - 1} SIGTERM")
    skipped = train(after, 2, *flags(data, after, *args, "--save-period", "1"), fault=f"1 loss {STEPS} nan")
    assert skipped.code == 0, skipped.said
    one, two = state(before), state(after, "epoch0.pt")
    assert (one["step"], one["skipped_steps"]) == (STEPS - 1, 0)
    assert (two["step"], two["skipped_steps"], two["ema_updates"]) == (STEPS, 1, one["ema_updates"])
    for part in ("model", "ema", "optimizer"):
        mine, theirs = tensors(one[part]), tensors(two[part])
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine), part
    assert losses(after / "exp").notna().all().all()
    assert state(after)["skipped_steps"] == 1


def test_ten_nan_in_a_row_end_the_run(data: Path, tmp_path: Path) -> None:
    outcome = fail(data, tmp_path, "1 loss 3 nan 99")
    assert outcome.err.count("has not been finite for 10 steps in a row") == 1, outcome.said
    assert "step 12 (epoch 2, batch 4)" in outcome.err, outcome.said
    assert str(data.parent / "shapes" / "images" / "train") in outcome.err
    assert str(tmp_path / "exp" / "weights" / "last.pt") in outcome.err


def test_ranks_that_were_asked_for_other_work_are_refused_before_they_wait_for_each_other(
    data: Path, tmp_path: Path
) -> None:
    outcome = fail(data, tmp_path, "", env={"ARGS_OF_RANK_1": "--evolve 1 --weights other.pt"})
    assert outcome.err.count("the ranks do not agree") == 1, outcome.said
    assert "--evolve: " in outcome.err and "--weights: " in outcome.err, outcome.said
