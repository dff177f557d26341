"""Images of more than 8 bits in the index, the cache and `--check-data`."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from tessera.data.feed.cache import open_images
from tessera.data.feed.image_store import ImageStore
from tessera.data.source.decode import decode_raw_pixels, read_image, read_raw_pixels
from tessera.utils.bit_depth import PixelRule, to_uint8
from tessera.utils.environment import cache_dir
from tessera.utils.ranks.world import World
from tests.data.make import write_dataset
from tests.data.source.made_yaml import build, check

TWELVE_BITS = PixelRule("range", 0, 4095)


def ramp(shape: tuple[int, ...] = (24, 32, 3), brightest: int = 4095) -> np.ndarray:
    """Levels of 12 bits in 16, every channel another."""
    levels = np.linspace(0, brightest, int(np.prod(shape))).round().astype(np.uint16).reshape(shape)
    return levels[::-1]


def write(path: Path, levels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), levels if levels.ndim == 2 else levels[..., ::-1])
    return path


def dataset(folder: Path, brightest: int = 4095, more: str = "") -> Path:
    yaml = write_dataset(folder, {"train/a": "0 0.5 0.5 0.5 0.5\n", "val/a": "0 0.5 0.5 0.5 0.5\n"}, f"[a]\n{more}")
    for split in ("train", "val"):
        (folder / f"images/{split}/a.jpg").unlink()
        write(folder / f"images/{split}/a.png", ramp(brightest=brightest - (split == "val")))
    return yaml


@pytest.mark.parametrize(
    "suffix, shape", [(".png", (24, 32, 3)), (".tif", (24, 32, 3)), (".ppm", (24, 32, 3)), (".png", (24, 32))]
)
@pytest.mark.parametrize("rule", [None, TWELVE_BITS, PixelRule("percentile", 1, 99.5)], ids=str)
def test_every_format_by_one_rule(tmp_path: Path, suffix: str, rule: PixelRule | None, shape: tuple[int, ...]) -> None:
    levels = ramp(shape)
    path = write(tmp_path / f"a{suffix}", levels)
    levels = levels if levels.ndim == 3 else np.dstack([levels] * 3)
    np.testing.assert_array_equal(read_raw_pixels(path), levels)
    np.testing.assert_array_equal(read_image(path, 1, rule), to_uint8(levels, rule))
    np.testing.assert_array_equal(decode_raw_pixels(path.read_bytes(), "it"), levels)


@pytest.mark.parametrize("suffix", [".png", ".tif", ".ppm", ".bmp", ".jpg", ".webp", ".gif", ".pfm"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.float64, np.int16])
def test_pixels_lie_in_a_row(tmp_path: Path, suffix: str, dtype: type) -> None:
    """Whatever a file holds: the cache writes them as they lie."""
    try:
        written, encoded = cv2.imencode(suffix, ramp(brightest=255).astype(dtype))
    except cv2.error:
        written = False
    if not written:
        pytest.skip("OpenCV does not write that")
    (tmp_path / f"a{suffix}").write_bytes(encoded.tobytes())
    image = read_image(tmp_path / f"a{suffix}")
    assert image.dtype == np.uint8 and image.shape == (24, 32, 3) and image.flags.c_contiguous


def test_the_rule_of_the_yaml_reaches_the_store_and_its_cache(tmp_path: Path) -> None:
    plain = build(dataset(tmp_path / "plain"))
    index = build(dataset(tmp_path / "ruled", more="pixels: {range: [0, 4095]}\n"))
    again = build(tmp_path / "ruled.yaml")
    assert plain.pixels is None and index.pixels == again.pixels == TWELVE_BITS
    assert index.content_hash() == again.content_hash() != plain.content_hash()
    assert ImageStore(plain, 32, "area").load(0).max() == 15 and ImageStore(index, 32, "area").load(0).max() == 255
    with open_images(index, 32, "disk", "area", World()) as store:
        np.testing.assert_array_equal(store.load(0), ImageStore(index, 32, "area").load(0))
    (cache,) = (cache_dir() / "images").glob("*.bin")
    assert "range-0-4095" in cache.name


def test_dark_images_are_noted(tmp_path: Path) -> None:
    notes = check(dataset(tmp_path / "dark")).notes
    assert len(notes) == 2
    assert "train: of 1 image with more than 8 bits, the brightest level is 4095, which becomes 15 of 255" in notes[0]
    assert "`pixels: {range: [0, 4095]}` into dark.yaml" in notes[0]
    assert not check(dataset(tmp_path / "ruled", more="pixels: {range: [0, 4095]}\n")).notes
    assert not check(dataset(tmp_path / "bright", brightest=65535)).notes
