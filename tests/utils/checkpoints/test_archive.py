"""A checkpoint's archive: no bit of it is wrong, and nothing in it unfolds beyond the file."""

from __future__ import annotations

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

BIG = b"L1000000000000L\n"


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


def test_every_flipped_bit_is_found(tmp_path: Path, whole: bytes) -> None:
    """Also in headers, padding and times, which no member's own checksum covers."""
    directory = whole.index(b"PK\1\2")
    rng = np.random.default_rng(0)
    anywhere = rng.integers(0, len(whole), 200).tolist()
    for position in [*anywhere, *rng.integers(directory, len(whole), 50).tolist(), *range(len(whole) - 40, len(whole))]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(rng.integers(8))
        refused(tmp_path / "last.pt", damaged)


def test_a_lost_seal_is_found(tmp_path: Path, whole: bytes) -> None:
    for missing in range(1, 20):
        refused(tmp_path / "last.pt", whole[:-missing])


def test_a_checkpoint_from_before_there_were_seals(tmp_path: Path) -> None:
    state = full(make_state())
    torch.save(state, tmp_path / "last.pt")
    assert_equal(state, load_checkpoint(tmp_path / "last.pt"))


def repacked(whole: bytes, *, packed: str = "", method: int = zipfile.ZIP_DEFLATED, pickled: bytes = b"") -> bytes:
    """The same archive with members whose name ends with `packed` compressed, or with another pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as source, zipfile.ZipFile(file, "w") as target:
        for name in source.namelist():
            content = pickled if pickled and name.endswith("data.pkl") else source.read(name)
            target.writestr(name, content, method if packed and name.endswith(packed) else zipfile.ZIP_STORED)
    return file.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("packed", ["data.pkl", "data/0", "version"])
def test_compressed_members_are_refused_unread(
    tmp_path: Path, whole: bytes, packed: str, method: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = repacked(whole, packed=packed, method=method)

    def unpacked(*_: object) -> None:
        raise AssertionError("a member was unpacked")

    monkeypatch.setattr(zipfile, "_get_decompressor", unpacked)
    monkeypatch.setattr(torch, "load", unpacked)
    refused(tmp_path / "last.pt", content, "refused: compressed")


@pytest.mark.parametrize(
    ("numel", "size", "complaint"),
    [
        (BIG, b"K\1", "has 600 bytes, expected 4000000000000"),
        (b"K\x96", BIG, "in 150 elements"),
        (b"K\5", b"K\5", "has 600 bytes, expected 20"),
    ],
)
def test_sizes_are_those_of_the_file(tmp_path: Path, numel: bytes, size: bytes, complaint: str) -> None:
    """What the pickle asks for, which torch.load believes."""
    torch.save({"w": torch.zeros(150)}, tmp_path / "small.pt")
    whole = (tmp_path / "small.pt").read_bytes()
    storage = b"((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpu" + numel + b"tQ"
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n" + storage + b"K\0(" + size + b"t(K\1t\x89ccollections\nOrderedDict\n)RtR"
    )
    hostile = b"\x80\2}X\5\0\0\0epoch" + tensor + b"s."
    refused(tmp_path / "last.pt", repacked(whole, pickled=hostile), complaint)


def test_nested_tuples_as_a_key(tmp_path: Path, whole: bytes) -> None:
    """To hash them ends the process in torch.load(weights_only=True) and in `pickle.Unpickler`, stubs or not."""
    pickled = b"\x80\2}N" + b"\x85" * 200_000 + b"K\1s."
    refused(tmp_path / "last.pt", repacked(whole, pickled=pickled), "a key that is a tuple")


def test_two_members_of_one_name(tmp_path: Path, whole: bytes) -> None:
    file = io.BytesIO(repacked(whole))
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(archive.namelist()[-1], b"other")
    refused(tmp_path / "last.pt", file.getvalue(), "two of its members have one name")
