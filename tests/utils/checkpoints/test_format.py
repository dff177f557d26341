"""Checkpoint files: whole or not at all, plain, bit-equal; damaged and hostile ones refused."""

from __future__ import annotations

import errno
import gzip
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tessera
from tessera.utils.checkpoints import provenance
from tessera.utils.checkpoints.format import FORMAT, KEYS, load_checkpoint, save_checkpoint
from tessera.utils.checkpoints.restricted_unpickler import Damaged
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.errors import UserError
from tests.utils.checkpoints.made_state import assert_equal, full, make_state, train


def test_keys_are_those_of_the_format() -> None:
    assert " ".join(KEYS) == (
        "model ema ema_updates optimizer scaler epoch step step_in_epoch epoch_losses epoch_skipped "
        "skipped_steps class_maps best_fitness stopper rng metrics thresholds config hyp model_yaml names stride imgsz "
        "anchors pixels dataset_hash version date tessera_version git"
    )


def test_a_file_says_which_program_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "git_revision", lambda: "c0ffee")
    assert provenance.written_by() == {"tessera_version": tessera.__version__, "git": "c0ffee"}
    assert full(make_state())["tessera_version"] == tessera.__version__


def test_round_trip_is_bit_equal(tmp_path: Path) -> None:
    state = make_state()
    train(state, 3)
    saved = full(state, git="0123-dirty")
    save_checkpoint(tmp_path / "weights/last.pt", saved)
    loaded = load_checkpoint(tmp_path / "weights/last.pt")
    assert_equal(dict(saved), loaded)
    assert loaded["names"] == ["class0", "class1"] and loaded["stride"] == [8.0, 16.0] and loaded["version"] == FORMAT
    assert loaded["anchors"].shape == (2, 3, 2) and loaded["config"] == {"epochs": 3, "freeze": [0]}
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["last.pt"]


def test_a_file_of_before_a_key_has_nothing_there(tmp_path: Path) -> None:
    added = ("imgsz", "pixels", "metrics", "thresholds", "tessera_version")
    torch.save({key: value for key, value in full(make_state()).items() if key not in added}, tmp_path / "last.pt")
    loaded = load_checkpoint(tmp_path / "last.pt")
    assert set(loaded) == set(KEYS) and [loaded[key] for key in added] == [None] * len(added)


def test_loads_in_a_fresh_process(tmp_path: Path) -> None:
    """Without a class of ours in the file: torch alone reads it."""
    state = make_state(optimizer="AdamW")
    train(state, 2)
    save_checkpoint(tmp_path / "last.pt", full(state))
    code = (
        "import sys, torch; s = torch.load(sys.argv[1], weights_only=True); "
        "assert not [m for m in sys.modules if m.split('.')[0] in ('utils', 'models', 'data')]; "
        "print(len(s), float(s['ema']['model.0.weight'].double().sum()))"
    )
    command = [sys.executable, "-c", code, "last.pt"]
    count, total = subprocess.check_output(command, text=True, cwd=tmp_path).split()
    assert int(count) == len(KEYS)
    assert float(total) == float(state.ema.model.state_dict()["model.0.weight"].double().sum())


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
        ("config", {"project": Path("x")}, "a PosixPath"),
        ("hyp", {"lr0": np.float64(1)}, "a float64"),
        ("names", [{1, 2}], "a set"),
        ("model_yaml", {(1, 2): 3}, "a name that is no text"),
        ("epoch", -1, r"`epoch` \(int\) is not a whole number"),
    ):
        with pytest.raises(Damaged, match=where):
            save_checkpoint(tmp_path / "last.pt", {**state, key: value})
    with pytest.raises(AssertionError, match=r"missing \{'git'\}"):
        save_checkpoint(tmp_path / "last.pt", {k: v for k, v in state.items() if k != "git"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    path = tmp_path / "last.pt"
    state = make_state()
    save_checkpoint(path, full(state))
    before = path.read_bytes()
    train(state, 1)

    real = torch.save

    def full_disk(value: Any, file: Any) -> None:
        writes = 0

        class Full:
            def write(self, content: Any) -> int:
                nonlocal writes
                if writes == after:
                    raise OSError(errno.ENOSPC, "No space left on device")
                writes += 1
                return file.write(content)

            def flush(self) -> None:
                file.flush()

        real(value, Full())

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UserError) as caught:
        save_checkpoint(path, full(state))
    message = str(caught.value)
    assert message.startswith(f"{path}: cannot write the checkpoint: No space left on device.")
    assert "The previous one is whole" in message and "MiB free" in message and "--resume" in message
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_a_file_size_limit_of_the_system(tmp_path: Path) -> None:
    """The real thing: the kernel refuses the write, in another process since the limit lasts."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, full(make_state()))
    before = path.read_bytes()

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with pytest.raises(UserError, match=r"File too large.* The previous one is whole"):
            save_checkpoint(path, state)

    state = full(make_state(width=64))
    assert os.waitstatus_to_exitcode(os.waitpid(forked(limited), 0)[1]) == 0
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_defects_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the system says of the file is the user's matter."""

    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        save_checkpoint(tmp_path / "last.pt", full(make_state()))


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "last.pt"
    save_checkpoint(path, full(make_state()))
    return path.read_bytes()


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
        (gzip.compress(b"x"), "a gzip archive, which must be unpacked first"),
        (b"\0\xff\xd8", "no zip archive"),
        (b"PK\3\4 torn", "the beginning of a checkpoint, 9 bytes without an end"),
    ],
    ids=["text", "empty", "gzip", "bytes", "torn"],
)
def test_what_is_there_instead_of_weights_is_said_and_others_offered(
    tmp_path: Path, content: bytes, found: str
) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(content)
    (tmp_path / "best.pt").touch()
    for read in (load_checkpoint, load_weights):
        with pytest.raises(UserError) as caught:
            read(path)
        assert str(caught.value) == (
            f"{path}: damaged, or not a checkpoint: found {found}. Take another, such as best.pt beside it, or copy "
            "the file again from its source."
        )


def test_foreign_files(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "lr": 1}, tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"found a dictionary with 'state_dict', 'lr'.*--resume, or for --weights"):
        load_checkpoint(tmp_path / "other.pt")
    torch.save(torch.zeros(2), tmp_path / "tensor.pt")
    with pytest.raises(UserError, match="found a Tensor"):
        load_checkpoint(tmp_path / "tensor.pt")


def test_hostile_files_run_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {mark}",)

    torch.save({**full(make_state()), "config": Hostile()}, tmp_path / "last.pt")
    torch.save({"model": Hostile()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, complaint in (("last.pt", r"asks for '\w+\.system'"), ("old.pt", "damaged, or not a checkpoint")):
        for read in (load_checkpoint, load_weights):
            with pytest.raises(UserError, match=complaint):
                read(tmp_path / name)
    assert not mark.exists()


def test_versions(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    state = full(make_state())
    torch.save({**state, "version": FORMAT + 1, "new": 1}, path)
    with pytest.raises(UserError, match="later version"):
        load_checkpoint(path)
    torch.save({k: v for k, v in state.items() if k not in ("rng", "stopper")}, path)
    with pytest.raises(UserError, match="incomplete, without stopper, rng"):
        load_checkpoint(path)
