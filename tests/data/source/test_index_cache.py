"""The cached index: reuse, invalidation and damage."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.source import index as module
from tessera.data.source.index import read_index, write_index
from tessera.utils.types import DatasetIndex
from tests.data.make import replace_unseen, write_dataset, write_image
from tests.data.source.made_yaml import BOX, build, same
from tests.leftover import leave_behind


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of images of all scans that really happen."""
    seen: list[int] = []
    real = module.scan

    def counted(listing, names):  # type: ignore[no-untyped-def]
        seen.append(len(listing.images))
        return real(listing, names)

    monkeypatch.setattr(module, "scan", counted)
    return seen


def test_second_start_reads_the_file(tmp_path: Path, scans: list[int]) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": BOX, "train/b": "x", "train/c": "0 0 0 1 0 1 1"})
    first, second = build(yaml), build(yaml)
    assert scans == [3]
    assert same(first, second)
    assert not second.boxes_xyxy.flags.writeable and not first.boxes_xyxy.flags.writeable
    assert same(pickle.loads(pickle.dumps(second)), first)


def test_what_the_first_rank_has_verified_is_not_listed_again(
    tmp_path: Path, scans: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": BOX, "train/b": "x"})
    verified: dict[str, str] = {}
    first = build(yaml, verified=verified)
    assert list(verified.values()) == [first.digest]
    with monkeypatch.context() as patch:
        patch.setattr(module, "list_images", lambda *_: pytest.fail("the images were listed again"))
        patch.setattr(DatasetIndex, "path", lambda *_: pytest.fail("the fingerprint was computed again"))
        again = build(yaml, verified=verified)
        assert same(again, first) and again.content_hash() == first.content_hash()
    # The file may be another's, damaged or gone: then this rank looks for itself.
    change_label(tmp_path / "pets")
    assert same(build(yaml, verified=dict.fromkeys(verified, "another")), build(yaml)) and scans == [2, 2]
    cache_file(tmp_path).unlink()
    assert len(build(yaml, verified=verified)) == 1 and len(scans) == 3


def test_the_stored_fingerprint_is_that_of_names_sizes_and_labels(tmp_path: Path) -> None:
    """The value that checkpoints of earlier versions hold."""
    yaml = write_dataset(tmp_path / "pets", {"train/a": BOX, "train/é": None, "train/b": "0 0 0 1 0 1 1"})
    index = build(yaml)
    state = hashlib.blake2b("\0".join(index.path(i).name for i in range(3)).encode(), digest_size=8)
    state.update("\0".join(index.names).encode())
    for array in (index.sizes_hw, index.box_offsets, index.classes, index.boxes_xyxy, index.segment_points):
        state.update(array.tobytes())
    assert index.stored_hash == index.content_hash() == state.hexdigest()
    assert dataclasses.replace(index, stored_hash="").content_hash() == state.hexdigest()


def test_a_half_written_index_of_a_killed_run_goes(tmp_path: Path) -> None:
    torn = leave_behind(tmp_path / "cache" / "index" / "pets-train.index")
    build(write_dataset(tmp_path / "pets", {"train/a": BOX}))
    (path,) = torn.parent.iterdir()
    assert path != torn


def change_label(root: Path) -> None:
    (root / "labels/train/a.txt").write_text("1 0.5 0.5 0.5 0.5 \n")


def rename_class(root: Path) -> None:
    yaml = root.parent / "pets.yaml"
    yaml.write_text(yaml.read_text().replace("dog", "wolf"))


CHANGES: dict[str, Callable[[Path], object]] = {
    "image touched": lambda root: os.utime(root / "images/train/a.jpg", ns=(1, 1)),
    "image grown": lambda root: write_image(root / "images/train/a.jpg", (50, 60)),
    "image added": lambda root: write_image(root / "images/train/new.jpg"),
    "image removed": lambda root: (root / "images/train/a.jpg").unlink(),
    "label changed": change_label,
    "label replaced": lambda root: replace_unseen(root / "labels/train/a.txt", b"0", b"1"),
    "image replaced": lambda root: replace_unseen(root / "images/train/a.jpg", b"JFIF", b"JFXX"),
    "label added": lambda root: (root / "labels/train/b.txt").write_text(BOX),
    "label removed": lambda root: (root / "labels/train/a.txt").unlink(),
    "label fixed": lambda root: (root / "labels/train/bad.txt").write_text(BOX),
    "class renamed": rename_class,
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_builds_anew(tmp_path: Path, scans: list[int], change: str) -> None:
    root = tmp_path / "pets"
    yaml = write_dataset(root, {"train/a": BOX, "train/b": None, "train/bad": "x", "train/z": BOX})
    first = build(yaml)
    CHANGES[change](root)
    second = build(yaml)
    assert len(scans) == 2
    assert first.digest != second.digest
    assert same(second, build(yaml)) and len(scans) == 2


def test_moved_dataset_keeps_its_digest(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": BOX})
    before = build(yaml)
    (tmp_path / "pets").rename(tmp_path / "animals")
    yaml.write_text(yaml.read_text().replace("path: " + str(tmp_path / "pets"), "path: " + str(tmp_path / "animals")))
    after = build(yaml)
    assert before.digest == after.digest
    assert after.path(0) == tmp_path / "animals/images/train/a.jpg"


def cache_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "index").iterdir()
    return path


@settings(deadline=None)
@given(st.data())
def test_damaged_cache_is_rebuilt(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damage")
    empty = np.zeros(0, np.int64)
    index = DatasetIndex(
        "train", ("a",), np.zeros(3, np.uint8), np.array([0, 3]), np.ones((1, 2), np.int32), np.array([0, 0]),
        np.zeros(0, np.int32), np.zeros((0, 4), np.float32), empty, np.zeros((0, 2), np.float32), "digest", ("p",),
    )  # fmt: skip
    write_index(folder / "a.index", index, {})
    stored = read_index(folder / "a.index")
    assert stored is not None and same(stored[0], index)
    raw = bytearray((folder / "a.index").read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    (folder / "b.index").write_bytes(raw)
    assert read_index(folder / "b.index") is None
    (folder / "c.index").write_bytes(raw[:at])
    assert read_index(folder / "c.index") is None


def test_damaged_cache_does_not_matter(tmp_path: Path, scans: list[int]) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": BOX})
    first = build(yaml)
    path = cache_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert same(build(yaml), first) and len(scans) == 2
    assert same(build(yaml), first) and len(scans) == 2


def test_unwritable_cache_warns_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "file" / "cache"))
    yaml = write_dataset(tmp_path / "pets", {"train/a": BOX})
    assert len(build(yaml)) == 1
    assert "Set TESSERA_CACHE to a writable folder" in caplog.text
