"""The folder of a dataset that is made from another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.data.conversion.new_folder import new_folder
from tessera.data.source.place import require_new
from tessera.data.source.spec import load_spec
from tessera.utils.errors import UserError
from tests.data.make import write_dataset


def test_nothing_that_is_there_is_written_to(tmp_path: Path) -> None:
    spec = load_spec(write_dataset(tmp_path / "set", {"train/a": "0 0.5 0.5 1 1\n", "val/a": ""}))
    (tmp_path / "empty").mkdir()
    require_new(tmp_path / "empty", spec, "--corrected")
    require_new(tmp_path / "new" / "er", spec, "--corrected")
    with pytest.raises(UserError, match=r"--corrected .*not empty.* Name a new folder"):
        require_new(tmp_path / "set", spec, "--corrected")
    with pytest.raises(UserError, match=r"--corrected .*lies in .*images/val"):
        require_new(tmp_path / "set" / "images" / "val" / "copy", spec, "--corrected")
    with pytest.raises(UserError, match="found a file, expected a folder"):
        require_new(spec.yaml_path, spec, "--corrected")
    with pytest.raises(UserError, match=r"/proc/no/where: it cannot be made in /proc \("):
        require_new(Path("/proc/no/where"), spec, "--corrected")


def write(folder: Path, *names: str) -> None:
    with new_folder(folder) as staged:
        for name in names:
            (staged / name).touch()


def test_it_is_whole_or_not_there(tmp_path: Path) -> None:
    """An empty one is taken; what fails leaves it as it was, and nothing beside it."""
    folder = tmp_path / "it"
    folder.mkdir()
    with pytest.raises(UserError, match=r"it: it cannot be written: No such file or directory \(.*/in\)"):
        write(folder, "a", "not/in")
    assert [*tmp_path.rglob("*")] == [folder]
    write(folder, "a")
    assert [*tmp_path.rglob("*")] == [folder, folder / "a"]
