"""Checkpoint files: atomic writes, bit-equal reads, errors for damaged and foreign files."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.utils.checkpoints.archive import DamagedFile
from tessera.utils.checkpoints.format import FORMAT, KEYS, check_values, load_checkpoint, save_checkpoint
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.errors import UserError
from tests.utils.checkpoints.made_state import assert_equal, full, make_state, train


def test_keys_are_those_of_the_format() -> None:
    assert " ".join(KEYS) == (
        "model ema ema_updates optimizer scaler epoch step step_in_epoch epoch_losses epoch_skipped "
        "skipped_steps class_maps best_fitness stopper rng metrics thresholds config hyp model_yaml names stride imgsz "
        "anchors pixels dataset_hash version date tessera_version git"
    )


def test_round_trip_is_bit_equal_and_torch_alone_reads_the_file(tmp_path: Path) -> None:
    state = make_state()
    train(state, 3)
    saved = full(state, git="0123-dirty")
    path = tmp_path / "weights" / "last.pt"
    save_checkpoint(path, saved)
    loaded = load_checkpoint(path)
    assert_equal(dict(saved), loaded)
    assert_equal(dict(saved), torch.load(path, weights_only=True))
    assert loaded["names"] == ["class0", "class1"] and loaded["stride"] == [8.0, 16.0] and loaded["version"] == FORMAT
    assert loaded["anchors"].shape == (2, 3, 2) and loaded["config"] == {"epochs": 3, "freeze": [0]}
    assert [p.name for p in path.parent.iterdir()] == ["last.pt"]


def test_a_file_of_before_a_key_has_nothing_there(tmp_path: Path) -> None:
    added = ("imgsz", "pixels", "metrics", "thresholds", "tessera_version")
    torch.save({key: value for key, value in full(make_state()).items() if key not in added}, tmp_path / "last.pt")
    loaded = load_checkpoint(tmp_path / "last.pt")
    assert set(loaded) == set(KEYS) and [loaded[key] for key in added] == [None] * len(added)


# Writing: whole or not at all


def forked(work: Callable[[], None]) -> int:
    """Start a child process that does `work` and nothing of pytest's; its exit code is 0 where that went well."""
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return process


def test_what_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    state = full(make_state())
    for key, value, where in (
        ("config", {"project": Path("x")}, "of type PosixPath"),
        ("hyp", {"lr0": np.float64(1)}, "of type float64"),
        ("names", [{1, 2}], "of type set"),
        ("model_yaml", {(1, 2): 3}, "a key that is neither text"),
        ("epoch", -1, r"`epoch` \(int\) is not a whole number"),
    ):
        with pytest.raises(DamagedFile, match=where):
            save_checkpoint(tmp_path / "last.pt", {**state, key: value})
    with pytest.raises(AssertionError, match=r"missing \{'git'\}"):
        save_checkpoint(tmp_path / "last.pt", {k: v for k, v in state.items() if k != "git"})
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_of_the_system(tmp_path: Path) -> None:
    """The real thing: the kernel refuses the write, in another process since the limit lasts."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, full(make_state()))
    before = path.read_bytes()

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with pytest.raises(UserError, match=r"File too large.* The previous one is intact"):
            save_checkpoint(path, state)

    state = full(make_state(width=64))
    assert os.waitstatus_to_exitcode(os.waitpid(forked(limited), 0)[1]) == 0
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("")
    with pytest.raises(UserError, match=r"weights/last\.pt: cannot write the checkpoint: .*--project"):
        save_checkpoint(tmp_path / "weights/last.pt", full(make_state()))


def test_killed_while_saving(tmp_path: Path) -> None:
    """kill -9 at any moment of a loop of saves: what lies there is always a whole checkpoint."""
    path = tmp_path / "last.pt"
    state = full(make_state())
    content = [torch.full((300_000,), float(step)) for step in range(50)]

    def save_again_and_again() -> None:
        for step in range(10_000):
            save_checkpoint(path, {**state, "step": step % 50, "model": {"w": content[step % 50]}})
            os.write(writing, b".")

    for round_ in range(8):
        reading, writing = os.pipe()
        process = forked(save_again_and_again)
        os.close(writing)
        for _ in range(2 + round_):
            assert os.read(reading, 1) == b"."
        time.sleep(0.001 * round_)
        os.kill(process, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
        os.close(reading)
        loaded = load_checkpoint(path)
        assert loaded["step"] >= 1 and (loaded["model"]["w"] == loaded["step"]).all()


# Reading


def test_missing_files(tmp_path: Path) -> None:
    (tmp_path / "last.pt").touch()
    with pytest.raises(UserError, match=r"lst\.pt: no such checkpoint\. Did you mean 'last\.pt'\?"):
        load_checkpoint(tmp_path / "lst.pt")
    with pytest.raises(UserError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "nowhere/last.pt")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"<html>\r\nnot found\n</html>", "text: '<html> not found </html>'"),
        (b"", "an empty file"),
        (b"\0\xff\xd8", "no zip archive"),
        (b"PK\3\4 torn", "a truncated checkpoint of 9 bytes"),
    ],
    ids=["text", "empty", "bytes", "torn"],
)
def test_the_error_for_another_file_describes_it_and_names_other_checkpoints(
    tmp_path: Path, content: bytes, found: str
) -> None:
    """Only a checkpoint to resume from is offered to --resume."""
    path, best = tmp_path / "last.pt", tmp_path / "best.pt"
    path.write_bytes(content)
    best.touch()
    damaged = f"{path}: damaged, or not a checkpoint: found {found}."
    whole = "Use another checkpoint, such as {} in the same directory, or copy the file again."
    for read, remedy in (
        (load_weights, whole.format("best.pt")),
        (load_checkpoint, f"Copy the file again, or start a new run from {best} with --weights."),
    ):
        with pytest.raises(UserError) as caught:
            read(path)
        assert str(caught.value) == f"{damaged} {remedy}"
    (tmp_path / "epoch3.pt").touch()
    with pytest.raises(UserError) as caught:
        load_checkpoint(path)
    assert str(caught.value) == f"{damaged} {whole.format('epoch3.pt')}"


def test_foreign_files(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "lr": 1}, tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"found a dictionary with 'state_dict', 'lr'.*--resume, or for --weights"):
        load_checkpoint(tmp_path / "other.pt")
    torch.save(torch.zeros(2), tmp_path / "tensor.pt")
    with pytest.raises(UserError, match="found a Tensor"):
        load_checkpoint(tmp_path / "tensor.pt")


def test_versions(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    state = full(make_state())
    torch.save({**state, "version": FORMAT + 1, "new": 1}, path)
    with pytest.raises(UserError, match="later version"):
        load_checkpoint(path)
    torch.save({k: v for k, v in state.items() if k not in ("rng", "stopper")}, path)
    with pytest.raises(UserError, match="incomplete: missing stopper, rng"):
        load_checkpoint(path)


WRONG = (True, -1.5, 10**30, ["a", [1]], [1.5, "a"], {"a": "b"}, {"params": 1}, torch.zeros(3, dtype=torch.bool))


def test_a_wrong_value_is_named(tmp_path: Path) -> None:
    """The rest hold values by name, which their own readers check."""
    for key in sorted({*KEYS} - {"version", "hyp", "config", "model_yaml", "optimizer", "rng"}):
        refused = 0
        for value in WRONG:
            try:
                check_values({key: value})
            except DamagedFile as error:
                assert str(error).startswith(f"its `{key}` ({type(value).__name__}) is not ")
                refused += 1
        assert refused >= len(WRONG) - 1, key  # a number or a tensor is right in a few places
    torch.save({**full(make_state()), "epoch": "a"}, tmp_path / "last.pt")
    with pytest.raises(UserError, match=r"last\.pt: damaged: its `epoch` \(str\) is not a whole number\. Use"):
        load_checkpoint(tmp_path / "last.pt")
