"""`val: 0.2`: reproducible splits that keep near-duplicates together."""

from __future__ import annotations

import logging
import shutil
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest

from tessera.data.source import holdout
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.holdout import SIMILAR_BITS, ImageHashes, difference_hash, group_similar, hold_out
from tessera.data.source.index import build_index, index_warnings
from tessera.utils.errors import UserError
from tessera.utils.seeding import ValFraction
from tessera.utils.types import DatasetIndex
from tests.data.make import write_image
from tests.data.source.annotations.test_voc import voc, voc_object
from tests.data.source.made_yaml import BOX, build, check, coco_set, refuse


def write_images(root: Path, count: int = 40, kind: str = "text") -> Path:
    """Noise, of which numbers 0 to 3 are one image in four qualities, and 4 is that of 5 a byte longer."""
    for number in range(count):
        path = write_image(root / f"images/{number}.jpg", seed=number)
        if number < 4:
            noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
            pixels = cv2.GaussianBlur(noise, (0, 0), 3)
            cv2.imwrite(str(path), pixels, [cv2.IMWRITE_JPEG_QUALITY, 95 - 9 * number])
        label = {"text": root / f"labels/{number}.txt", "voc": root / f"annots/{number}.xml"}.get(kind)
        if label:
            label.parent.mkdir(exist_ok=True)
            label.write_bytes(BOX.encode() if kind == "text" else voc(voc_object()))
    (root / "images/4.jpg").write_bytes((root / "images/5.jpg").read_bytes() + b"\0")
    entry = "images"
    if kind == "coco":
        entry = "set.json"
        coco_set(root, {f"{n}.jpg": [{"category_id": 3, "bbox": [1, 2, 30, 20]}] for n in range(count)}, {3: "cat"})
    yaml = root.with_name(f"{root.name}.yaml")
    yaml.write_text(f"path: {root}\ntrain: {entry}\nval: 0.2\nnames: [cat]\n")
    return yaml


def names(index: DatasetIndex) -> list[str]:
    return sorted(index.path(number).stem for number in range(len(index)))


def parts(yaml: Path) -> tuple[list[str], list[str]]:
    spec = load_spec(yaml)
    return names(build_index(spec, "train")), names(build_index(spec, "val"))


@pytest.mark.parametrize("kind", ["text", "coco", "voc"])
def test_each_image_is_on_one_side_with_its_labels(tmp_path: Path, kind: str) -> None:
    yaml = write_images(tmp_path / "set", kind=kind)
    train, val = parts(yaml)
    assert sorted(train + val) == sorted(map(str, range(40))) and len(val) == 8
    for copies in ({"0", "1", "2", "3"}, {"4", "5"}):
        assert copies <= set(train) or copies <= set(val), "copies stay together"
    index = build(yaml, "val")
    assert len(index.classes) == 8 and not index.problems
    found = check(yaml)
    assert (found.errors, found.problems, found.images) == ([], [], 40)


def test_the_same_wherever_it_lies_and_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = write_images(tmp_path / "set")
    train, val = parts(yaml)
    moved = tmp_path / "elsewhere/deeper/set"
    shutil.copytree(tmp_path / "set", moved)
    for kind, suffix in (("images", "jpg"), ("labels", "txt")):
        for number in range(40):
            (moved / kind / f"{number}.{suffix}").rename(moved / kind / f"z{97 - number}.{suffix}")
    other = tmp_path / "elsewhere/set.yaml"
    other.write_text(yaml.read_text().replace(str(tmp_path / "set"), str(moved)))
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "other cache"))
    assert {f"z{97 - int(name)}" for name in val} == set(parts(other)[1])
    other.write_text(other.read_text() + "split_seed: 1\n")
    assert {f"z{97 - int(name)}" for name in val} != set(parts(other)[1])
    other.write_text(other.read_text().replace("val: 0.2", "val: 0.5"))
    assert len(parts(other)[1]) == 20
    assert parts(yaml) == (train, val), "neither is taken for the other"


def test_images_are_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[ValFraction] = []
    monkeypatch.setattr(
        holdout, "hold_out", lambda looks, fraction: (calls.append(fraction), hold_out(looks, fraction))[1]
    )
    yaml = write_images(tmp_path / "set")
    with caplog.at_level(logging.INFO):
        first = parts(yaml)
    assert "val: 0.2 of train with split_seed 0: 8 of 40 images" in caplog.text
    assert "of 36 groups (images that differ in at most 14 of 144 bits stay together; the largest" in caplog.text
    monkeypatch.setattr(holdout, "difference_hash", lambda *_: pytest.fail("compared again"))
    (tmp_path / "set/labels/7.txt").write_text(BOX * 2)  # the images are unchanged
    assert parts(yaml) == first and calls == [ValFraction(0.2, 0)], "train and val use one division"
    (looks,) = (tmp_path / "cache/index").glob("*-fingerprints-*")
    looks.write_bytes(looks.read_bytes()[:-1] + b"?")
    monkeypatch.undo()
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    shutil.copy(tmp_path / "set/labels/8.txt", tmp_path / "set/labels/7.txt")
    assert parts(yaml) == first, "a damaged cache is not used"


def test_a_new_image_moves_few_others(tmp_path: Path) -> None:
    yaml = write_images(tmp_path / "set")
    _, val = parts(yaml)
    write_image(tmp_path / "set/images/new.jpg", seed=99)
    assert len(set(val) ^ set(parts(yaml)[1])) <= 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("train: a\nval: 1.5", r"a\.yaml:2: val: found 1.5, expected a folder, or a fraction of train between 0 and 1"),
        ("train: a\nval: 20%", "val: found '20%', expected a folder, or a fraction.* Write 0.2 for a fifth"),
        ("train: a\nval: '0.2'", "val: found '0.2', expected a folder, or a fraction"),
        ("val: 0.2", "val: 0.2 is a fraction of train, which is missing"),
        ("train: a\nval: 0.2\nsplit_seed: x", r"a\.yaml:3: split_seed: found 'x', expected an integer from 0 on"),
        ("train: a\nval: b\nsplit_seed: 1", "split_seed: found without a fraction"),
        ("train: a\nval: true", "val: found True, expected a folder"),
    ],
)
def test_what_is_no_share(tmp_path: Path, text: str, what: str) -> None:
    refuse(tmp_path, f"{text}\nnames: [cat]\n", what)


def test_too_few_images(tmp_path: Path) -> None:
    yaml = write_images(tmp_path / "set", 6)
    for number in range(1, 6):
        shutil.copy(tmp_path / "set/images/0.jpg", tmp_path / f"set/images/{number}.jpg")
    with pytest.raises(UserError, match=r"val: 0\.2: train has too few different images \(6 files\)"):
        build(yaml, "val")


def prints_of(bits: np.ndarray) -> ImageHashes:
    contents = np.random.default_rng(0).integers(0, 256, (len(bits), 16), np.uint8)
    return ImageHashes(contents, np.packbits(bits, axis=1))


def test_chains_are_one_group_as_an_oracle_finds_them() -> None:
    rng = np.random.default_rng(3)
    bits = rng.random((60, 144)) < 0.5
    for at in range(1, 30):  # each some bits from an earlier one
        bits[at] = bits[rng.integers(at)]
        bits[at, rng.choice(144, rng.integers(1, 22), replace=False)] ^= True
    for max_bits in SIMILAR_BITS:
        found = group_similar(np.packbits(bits, axis=1), np.arange(60), max_bits)
        expected = np.arange(60)
        for one in range(60):
            for other in range(60):
                if (bits[one] != bits[other]).sum() <= max_bits:
                    expected[expected == expected[one]] = expected[other]
        assert ((found[:, None] == found) == (expected[:, None] == expected)).all()


def test_a_camera_that_stands_still_can_be_divided(caplog: pytest.LogCaptureFixture) -> None:
    """All look alike: then only those that look more alike stay together, and at last copies alone."""
    bits = np.repeat(np.random.default_rng(0).random((1, 144)) < 0.5, 50, 0)
    for at in range(50):
        bits[at, 2 * at : 2 * at + 2] ^= True  # 4 bits from each other
    found = hold_out(prints_of(bits), ValFraction(0.2, 0))
    assert found is not None and found.max_bits == 3 and found.is_val.sum() == 10
    assert hold_out(prints_of(np.repeat(bits[:1], 50, 0)), ValFraction(0.2, 0)) is None


def test_a_run_is_warned_where_both_sides_look_alike(tmp_path: Path) -> None:
    """At every start, not only when the images are divided."""
    yaml = write_images(tmp_path / "set")
    scene = np.random.default_rng(0).integers(60, 200, (9, 9), np.uint8)
    for number in range(40):  # something bright in another place
        frame = scene.copy()
        frame.ravel()[2 * number] = 255
        cv2.imwrite(str(tmp_path / f"set/images/{number}.jpg"), cv2.merge([frame.repeat(16, 0).repeat(16, 1)] * 3))
    said = "val: 0.2 of train: too many images look alike"
    for _ in range(2):
        train, val = (index_warnings(build(yaml, split)) for split in ("train", "val"))
        assert not train and len(val) == 1 and said in val[0], val
    (problem,) = [line for line in check(yaml).problems if "look alike" in line]
    assert problem.startswith(said) and "metrics will be too good" in problem


def test_shares_are_met_and_seeds_differ() -> None:
    looks = prints_of(np.random.default_rng(0).random((200, 144)) < 0.5)
    chosen = []
    for fraction in (0.01, 0.1, 0.2, 0.5, 0.9, 0.999):
        found = hold_out(looks, ValFraction(fraction, 0))
        assert found is not None and found.is_val.sum() == min(round(200 * fraction), 199)
        chosen.append(found.is_val)
    assert all((less <= more).all() for less, more in pairwise(chosen)), "a larger fraction holds the smaller one"
    other = hold_out(looks, ValFraction(0.2, 1))
    assert other is not None and not np.array_equal(other.is_val, chosen[2])


def test_an_image_looks_the_same_at_another_size() -> None:
    small = np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8)
    large = small.repeat(7, 0).repeat(5, 1)
    assert np.array_equal(difference_hash(small), difference_hash(large))
    assert not difference_hash(np.full((20, 30, 3), 7, np.uint8)).any()
