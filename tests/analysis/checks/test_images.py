"""Image checks: each planted kind is reported, copies are detected, and different images are not."""

from __future__ import annotations

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from tessera.analysis.checks.images import (
    BRIGHTER,
    CUT,
    DARKER,
    DEEP,
    GREY,
    TINY,
    TURNED,
    Fingerprint,
    fingerprint_of,
    near_duplicates,
)
from tessera.deploy.foreign.synthetic_shapes import render_image
from tessera.utils.bit_depth import Pixels
from tests.data.make import write_dataset
from tests.data.source.made_yaml import BOX, check
from tests.data.source.test_image_header import EXIF, exif, with_segments

PLANTED = {"a": CUT, "b": TURNED, "c": DARKER, "d": BRIGHTER, "e": DEEP, "f": GREY, "g": TINY}


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Ordinary images, and one of each kind."""
    ordinary = {f"{split}/{number}": BOX for split in ("train", "val") for number in range(9)}
    yaml = write_dataset(tmp_path / "pets", {**ordinary, **{f"train/{name}": BOX for name in PLANTED}})
    folder = tmp_path / "pets" / "images" / "train"
    raw = (folder / "a.jpg").read_bytes()
    (folder / "a.jpg").write_bytes(raw[: len(raw) // 2])
    turned = with_segments((folder / "b.jpg").read_bytes(), (0xE1, EXIF + exif(6)))
    (folder / "b.jpg").write_bytes(turned)
    noise = cv2.imread(str(folder / "c.jpg"))
    cv2.imwrite(str(folder / "c.jpg"), noise // 20)
    cv2.imwrite(str(folder / "d.jpg"), 250 + noise // 60)
    (folder / "e.jpg").unlink()
    cv2.imwrite(str(folder / "e.png"), noise.astype(np.uint16) * 16)  # 12 bits
    cv2.imwrite(str(folder / "f.jpg"), noise[..., 1])
    cv2.imwrite(str(folder / "g.jpg"), noise[:20, :40])
    return yaml


def test_each_kind_is_found_where_it_was_planted(planted: Path) -> None:
    found = check(planted)
    by_name = {(Path(image.path).stem, image.kind) for image in found.unusual_images}
    # 12 bits in 16 are dark, and what is nearly black or white has no colour left, or a little.
    assert by_name - {("e", DARKER), ("c", GREY), ("d", GREY)} == set(PLANTED.items())
    (deep,) = (image for image in found.unusual_images if image.kind == DEEP)
    assert deep.detail.endswith(", at most 15 of 255") and deep.split == "train"
    for kind in (TURNED, DARKER, BRIGHTER, GREY, TINY):
        assert sum(f" {kind} (" in line for line in found.notes) == 1, kind


def test_what_a_whole_set_is_like_is_no_remark(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {f"{split}/{n}": BOX for split in ("train", "val") for n in range(6)})
    for path in (tmp_path / "pets" / "images").rglob("*.jpg"):
        cv2.imwrite(str(path), cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)[:20, :40] // 20)
    assert check(yaml).unusual_images == []


def fingerprint(pixels: Pixels, number: int) -> Fingerprint:
    return fingerprint_of(pixels, str(number).encode())


def saved_again(pixels: Pixels, scale: float, quality: int) -> Pixels:
    size = round(pixels.shape[1] * scale), round(pixels.shape[0] * scale)
    done, encoded = cv2.imencode(".jpg", cv2.resize(pixels, size, interpolation=cv2.INTER_AREA), [1, quality])
    assert done
    return cv2.imdecode(encoded, cv2.IMREAD_COLOR)


@pytest.fixture(scope="module")
def drawn() -> list[Pixels]:
    """Images of the shapes; none is a copy."""
    return [render_image("train", number, size=320)[0] for number in range(60)]


def test_drawn_images_are_not_taken_for_each_other() -> None:
    assert (
        near_duplicates([fingerprint(render_image("train", number)[0], number) for number in range(400)], [0] * 400)
        == []
    )


@pytest.mark.parametrize(("scale", "quality"), [(1, 50), (0.5, 90), (0.4, 75), (1.6, 90)])
def test_copies_in_another_size_or_quality_are_found(drawn: list[Pixels], scale: float, quality: int) -> None:
    copies = [saved_again(pixels, scale, quality) for pixels in drawn]
    count = len(drawn)
    fingerprints = [fingerprint(pixels, number) for number, pixels in enumerate([*drawn, *copies])]
    found = near_duplicates(fingerprints, [0] * count + [1] * count)
    assert {second - first for first, second, _ in found} == {count}
    assert len(found) >= 0.85 * count  # of photographs all; grounds of little contrast have bits of chance


def test_plain_grounds_are_not_alike_by_their_grounds() -> None:
    prints = []
    for number in range(9):
        page = np.full((90, 90, 3), 255, np.uint8)
        left, top = 10 + 25 * (number % 3), 10 + 25 * (number // 3)
        page[top : top + 20, left : left + 20] = 0
        prints.append(fingerprint(page, number))
    assert near_duplicates(prints, [0] * 9) == []
    assert (
        near_duplicates([fingerprint(np.full((90, 90, 3), level, np.uint8), level) for level in range(5)], [0] * 5)
        == []
    )


def test_near_duplicates_between_splits_are_a_problem(tmp_path: Path, drawn: list[Pixels]) -> None:
    root = tmp_path / "pets"
    yaml = write_dataset(root, {f"{split}/{n}": BOX for split in ("train", "val") for n in range(4)})
    cv2.imwrite(str(root / "images/train/0.jpg"), drawn[0])
    cv2.imwrite(str(root / "images/val/1.jpg"), saved_again(drawn[0], 0.5, 80))
    cv2.imwrite(str(root / "images/train/2.jpg"), saved_again(drawn[0], 0.7, 80))
    shutil.copy(root / "images/train/3.jpg", root / "images/val/3.jpg")  # an equal file is told as that
    found = check(yaml)
    problem = "1 near-duplicate in val of images in train, such as images/train/"
    note = "1 near-duplicate in train of images in train, such as images/train/0.jpg ~ images/train/2.jpg"
    assert any(line.startswith(problem) for line in found.problems)
    assert note in found.notes
    assert [pair.splits for pair in found.near_duplicates] == [("train", "val"), ("train", "train")]


def test_of_a_large_crowd_every_image_is_told(drawn: list[Pixels]) -> None:
    """Frames of a still camera, more than each is compared with, in two splits."""
    frame = fingerprint(drawn[0], 0)
    frames = [frame._replace(digest=str(number).encode()) for number in range(140)]
    found = near_duplicates(frames, [0] * 120 + [1] * 20)
    assert {second for _, second, _ in found} == {*range(1, 140)}
    assert {second for first, second, _ in found if first < 120 <= second} == {*range(120, 140)}


def test_a_hash_of_zeros_is_one_like_others() -> None:
    ramp = np.linspace(255, 100, 90, dtype=np.uint8)
    page = np.repeat((ramp[:, None].astype(np.uint16) + ramp[None] >> 1).astype(np.uint8)[..., None], 3, 2)
    fingerprints = [fingerprint(page, 0), fingerprint(page, 1)]
    assert not fingerprints[0].bits.any()
    assert [pair[:2] for pair in near_duplicates(fingerprints, [0, 1])] == [(0, 1)]
