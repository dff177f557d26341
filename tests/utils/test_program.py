"""The program's revision, what `--version` prints, and the default device."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
import torch

import tessera
from tessera.utils.config import TrainConfig
from tessera.utils.flags import options, program
from tessera.utils.flags.program import git_revision
from tessera.utils.machine.accelerator import default_device


def test_git_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "HOME", tmp_path)
    assert git_revision() is None
    (tmp_path / ".git").mkdir()
    assert git_revision() is None  # not a repository after all
    (tmp_path / ".git").rmdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    if subprocess.run([*git, "init", "-q"], check=False, capture_output=True).returncode:
        pytest.skip("needs git")
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    revision = git_revision()
    assert revision is not None and len(revision) == 40
    (tmp_path / "file").write_text("2")
    assert git_revision() == f"{revision}-dirty"
    monkeypatch.setenv("PATH", "")
    assert git_revision() is None


@pytest.mark.parametrize(("revision", "shown"), [(None, ""), ("1a2b-dirty", " (git 1a2b-dirty)")])
def test_version_names_what_runs(
    revision: str | None, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "git_revision", lambda: revision)
    with pytest.raises(SystemExit, match="0"):
        TrainConfig.from_args(["--version"])
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    line = f"tessera {tessera.__version__}{shown}, {versions}, device {default_device()}\n"
    assert capsys.readouterr() == (line, "")


def test_the_device_that_a_run_takes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_device() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert default_device() == "cuda (2 present)"
