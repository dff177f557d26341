"""The folder of a dataset that is made from another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.data.conversion.new_folder import new_folder
from tessera.utils.errors import UserError


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
