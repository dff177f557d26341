"""TIFF layouts: exact levels, or a message that names the layout."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.data.source.decode import RefusedImage, UnusableImage, decode_raw_pixels, decoded_size
from tessera.data.source.image_header import extra_pages_message
from tessera.deploy.inference.input_images import to_pixels
from tessera.deploy.inference.sources.sources import open_sources
from tests.data.make import write_dataset
from tests.data.source.made_tiff import tiff
from tests.data.source.made_yaml import build

TYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "f4", "u8", "i8", "f8"]


def levels(dtype: str, bands: int = 0, height: int = 24, width: int = 31) -> np.ndarray:
    """Every bit pattern may come, of floats those that are numbers."""
    shape = (height, width, bands) if bands else (height, width)
    rng = np.random.default_rng(5)
    if np.dtype(dtype).kind == "f":
        return rng.random(shape).astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def decoded(encoded: bytes) -> np.ndarray:
    return decode_raw_pixels(encoded, "a.tif")


def as_colours(image: np.ndarray) -> np.ndarray:
    colours = image if image.ndim == 3 else image[..., None]
    return colours[..., :3] if colours.shape[2] >= 3 else np.repeat(colours[..., :1], 3, 2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", [{"rows": 7}, {"order": ">", "deflate": True}, {"big": True}], ids=str)
@pytest.mark.parametrize("bands", [0, 3, 4])
def test_levels_come_back(dtype: str, form: dict[str, Any], bands: int) -> None:
    written = levels(dtype, bands)
    if bands == 4 and written.itemsize > 2:
        written = written[..., :3]
    np.testing.assert_array_equal(decoded(tiff(written, **form)), as_colours(written))


@pytest.mark.parametrize(
    "dtype, bands, planar", [("u1", 2, False), ("u2", 3, False), ("u2", 4, False), ("u1", 2, True)]
)
def test_bands_without_a_colour_as_gdal_writes_them(dtype: str, bands: int, planar: bool) -> None:
    written = levels(dtype, bands)
    np.testing.assert_array_equal(decoded(tiff(written, colour=1, planar=planar)), as_colours(written))


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4"])
def test_white_is_zero(dtype: str) -> None:
    written = levels(dtype)
    np.testing.assert_array_equal(decoded(tiff(written, colour=0)), np.iinfo(dtype).max - as_colours(written))


@pytest.mark.parametrize("dtype, planar", [("u1", True), ("u2", False)])
def test_orientation_is_applied(dtype: str, planar: bool) -> None:
    written = levels(dtype, 3)
    turned = tiff(written, planar=planar, more={274: [6]})
    np.testing.assert_array_equal(decoded(turned), np.rot90(written, -1))


@pytest.mark.parametrize(
    "made, said",
    [
        (
            tiff(levels("u2", 4), colour=5),
            "4 bands of 16 bits whose PhotometricInterpretation is 5, expected grey, RGB",
        ),
        (tiff(levels("u2"), colour=3), "1 band of 16 bits whose PhotometricInterpretation is 3"),
        (tiff(levels("u1", 3), colour=1), "3 bands of 8 bits whose PhotometricInterpretation is 1"),
        (tiff(levels("u2", 3), planar=True), "3 bands of 16 bits in planes"),
        (tiff(levels("f2")), "1 band of 16 bits"),
        (tiff(levels("u2", 3), more={258: [16, 16, 8]}), "3 bands of 8/16 bits"),
        (tiff(levels("i2"), colour=0), "1 band of 16 bits"),
        (tiff(levels("u2", 3), more={259: [34887]}), "3 bands of 16 bits whose .* that does not decode"),
    ],
)
def test_other_layouts_are_named(tmp_path: Path, made: bytes, said: str) -> None:
    with pytest.raises(RefusedImage, match=f"a.tif: a TIFF of {said}"):
        decoded(made)
    (tmp_path / "a.tif").write_bytes(made)
    with pytest.raises(UnusableImage, match=f"^a TIFF of {said}"):
        decoded_size(str(tmp_path / "a.tif"), len(made))


def test_pages_are_counted_without_thumbnails_and_masks() -> None:
    image = levels("u1", height=10)
    said = "the first of 3 pages is used, the other 2 are skipped; save each page as a file"
    assert (
        extra_pages_message(tiff(image, image, image))
        == extra_pages_message(tiff(image, image, image, big=True, order=">"))
        == said
    )
    assert "2 pages is used, the other is skipped" in extra_pages_message(tiff(image, image))
    itself = bytearray(tiff(image))
    itself[-4:] = itself[4:8]
    for made in (
        tiff(image),
        tiff(image, image, more={254: [1]}),
        tiff(image, image, more={254: [4]}),
        tiff(image, image)[:-30],  # the second directory breaks off
        bytes(itself),
        *(b"", b"\xff\xd8\xff", b"II*\0"),
    ):
        assert extra_pages_message(made) == ""


def test_counting_pages_that_overlap_ends_soon() -> None:
    """Each of 20,000 directories of 65,535 entries begins 14 bytes after the one before."""
    pages, entries, first = 20_000, 65_535, 8
    made = bytearray(first + 14 * pages + 12 * entries + 6)
    made[:first] = b"II*\0" + struct.pack("<I", first)
    for at in range(first, first + 14 * pages, 14):
        struct.pack_into("<HHHI", made, at, entries, 254, 3, entries)
        struct.pack_into("<I", made, at + 2 + 12 * entries, at + 14)
    started = time.monotonic()
    assert extra_pages_message(bytes(made)) == ""
    assert time.monotonic() - started < 5


def test_a_training_and_detection_say_which_pages_they_leave_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    yaml = write_dataset(tmp_path / "set", {"train/a": "0 .5 .5 .5 .5\n"})
    image = tmp_path / "set/images/train/a.tif"
    image.with_suffix(".jpg").unlink()
    image.write_bytes(tiff(*[levels("u1")] * 3))
    remark = "a.tif: the first of 3 pages is used, the other 2 are skipped; save each page as a file"
    assert build(yaml).problems == (f"images/train/{remark}",)
    with open_sources(image, read=to_pixels) as sources:
        assert len(list(sources)) == 1
    assert f"{remark}." in caplog.text
