"""Image quality checks: each planted kind is reported, ordinary images are not."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from tessera.analysis.checks.images import BRIGHTER, CUT, DARKER, DEEP, GREY, TINY, TURNED
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
