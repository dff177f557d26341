"""Checkpoint archives: damaged bits are detected, and nothing unfolds beyond the file."""

from __future__ import annotations

import contextlib
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.utils.checkpoints.format import load_checkpoint, save_checkpoint
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.errors import UserError
from tests.utils.checkpoints.made_state import assert_equal, full, make_state


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "last.pt"
    save_checkpoint(path, full(make_state()))
    return path.read_bytes()


def refused(
    path: Path,
    content: bytes,
    complaint: str = r"last\.pt: (damaged|refused: compressed|not a checkpoint: expected one)",
) -> None:
    """Both readers give one message."""
    path.write_bytes(content)
    for read in (load_checkpoint, load_weights):
        with pytest.raises(UserError, match=complaint):
            read(path)


def test_a_flipped_bit_is_detected_or_changes_nothing(tmp_path: Path, whole: bytes) -> None:
    """It changes nothing in padding and dates; all that is read has a checksum."""
    path = tmp_path / "last.pt"
    path.write_bytes(whole)
    state, directory = load_checkpoint(path), whole.index(b"PK\1\2")
    rng, found = np.random.default_rng(0), 0
    anywhere = rng.integers(0, len(whole), 200).tolist()
    for position in [*anywhere, *rng.integers(directory, len(whole), 50).tolist(), *range(len(whole) - 40, len(whole))]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):
            assert_equal(state, load_checkpoint(path))
            continue
        found += 1
        refused(path, damaged)
    assert found > 100


def repacked(whole: bytes, packed: str = "", method: int = zipfile.ZIP_STORED) -> bytes:
    """The same archive, the members whose name ends with `packed` compressed."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as source, zipfile.ZipFile(file, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name), method if name.endswith(packed) else zipfile.ZIP_STORED)
    return file.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("packed", ["data.pkl", "data/0", "version"])
def test_compressed_members_are_refused_unread(
    tmp_path: Path, whole: bytes, packed: str, method: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = repacked(whole, packed, method)

    def unpacked(*_: object) -> None:
        raise AssertionError("a member was unpacked")

    monkeypatch.setattr(zipfile, "_get_decompressor", unpacked)
    monkeypatch.setattr(torch, "load", unpacked)
    refused(tmp_path / "last.pt", content, "refused: compressed")


def test_two_members_of_one_name(tmp_path: Path, whole: bytes) -> None:
    file = io.BytesIO(repacked(whole))
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(archive.namelist()[-1], b"other")
    refused(tmp_path / "last.pt", file.getvalue(), "two of its members have the same name")
