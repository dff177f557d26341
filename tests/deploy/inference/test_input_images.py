"""Tests of input images: one image gives the same pixels in every form."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from tessera.deploy.inference.input_images import DarkImageWarning, to_pixels
from tessera.utils.bit_depth import PixelRule, to_uint8
from tessera.utils.errors import ConfigError, UserError
from tests.deploy.exporting.made import made_image

SIZE_HW = (37, 52)
IMAGE = made_image(*SIZE_HW, seed=3)
TWELVE_BITS = PixelRule("range", 0, 4095)


def png(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def reversed_channels(array: np.ndarray) -> np.ndarray:
    return np.concatenate((array[..., 2::-1], array[..., 3:]), 2)


ALPHA = np.concatenate((IMAGE, np.full((*SIZE_HW, 1), 40, np.uint8)), 2)
DOORS: dict[str, Callable[[], np.ndarray]] = {
    "bytes": lambda: to_pixels(png(Image.fromarray(IMAGE))),
    "pil from a file": lambda: to_pixels(Image.open(io.BytesIO(png(Image.fromarray(IMAGE))))),
    "pil with alpha": lambda: to_pixels(Image.fromarray(ALPHA)),
    "bytes with alpha": lambda: to_pixels(png(Image.fromarray(ALPHA))),
    "rgba": lambda: to_pixels(ALPHA),
    "bgra": lambda: to_pixels(reversed_channels(ALPHA), color="bgr"),
    "a view": lambda: to_pixels(np.repeat(IMAGE, 2, 1)[:, ::2]),
    "uint16": lambda: to_pixels(IMAGE.astype(np.uint16) * 257),
    "float64": lambda: to_pixels(IMAGE / 255),
    "tensor with alpha": lambda: to_pixels(torch.from_numpy(ALPHA).permute(2, 0, 1)),
    "tensor of floats": lambda: to_pixels(torch.from_numpy(IMAGE / 255).permute(2, 0, 1).requires_grad_()),
}


@pytest.mark.parametrize("door", DOORS)
def test_one_image_in_every_form(door: str) -> None:
    found = DOORS[door]()
    assert found.dtype == np.uint8 and found.flags.c_contiguous
    np.testing.assert_array_equal(found, IMAGE)


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".jpg", ".webp", ".tif"])
def test_files_bytes_and_pil_are_equal(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"bild größe{suffix}"
    path.write_bytes(cv2.imencode(suffix, IMAGE[..., ::-1])[1].tobytes())
    pixels = to_pixels(path)
    assert np.abs(pixels.astype(int) - IMAGE).mean() < 10
    np.testing.assert_array_equal(to_pixels(str(path)), pixels)
    np.testing.assert_array_equal(to_pixels(path.read_bytes()), pixels)
    if suffix in (".png", ".bmp", ".tif"):  # where decoders have no choice
        np.testing.assert_array_equal(to_pixels(Image.open(path)), pixels)


@pytest.mark.parametrize("channels", [1, 2, None])
def test_grey_becomes_three_equal_channels(channels: int | None) -> None:
    grey = IMAGE[..., 0]
    array = grey if channels is None else np.stack([grey, np.zeros_like(grey)][:channels], 2)
    expected = np.repeat(grey[..., None], 3, 2)
    np.testing.assert_array_equal(to_pixels(array), expected)
    tensor = torch.from_numpy(array).movedim(-1, 0) if channels else torch.from_numpy(grey)
    for image in (tensor, png(Image.fromarray(grey)), Image.fromarray(grey)):
        np.testing.assert_array_equal(to_pixels(image), expected)


def test_palette_and_black_and_white() -> None:
    palette = Image.fromarray(IMAGE).quantize(16)
    palette.info["transparency"] = bytes([0, 128] + [255] * 14)
    expected = np.asarray(palette.convert("RGBA"))[..., :3]
    np.testing.assert_array_equal(to_pixels(palette), expected)
    np.testing.assert_array_equal(to_pixels(png(palette)), expected)
    bits = Image.fromarray(IMAGE[..., 0] > 100)
    assert bits.mode == "1"
    np.testing.assert_array_equal(to_pixels(bits), to_pixels(png(bits)))
    assert set(np.unique(to_pixels(bits))) == {0, 255}


def test_cmyk() -> None:
    """Pillow and OpenCV decode the inks alike but for a level or two; the conversion is one."""
    file = io.BytesIO()
    Image.fromarray(IMAGE).convert("CMYK").save(file, "JPEG", quality=95)
    by_file, by_pil = (to_pixels(file.getvalue()).astype(int), to_pixels(Image.open(file)).astype(int))
    assert np.abs(by_file - by_pil).max() <= 4
    assert np.abs(by_file - IMAGE).mean() < 12


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(IMAGE).save(file, "JPEG", quality=95, exif=exif)
    by_file, by_pil = to_pixels(file.getvalue()), to_pixels(Image.open(file))
    assert by_file.shape[:2] == (SIZE_HW if orientation < 5 else SIZE_HW[::-1])
    assert np.abs(by_file.astype(int) - by_pil).max() <= 4


@pytest.mark.parametrize("rule", [None, TWELVE_BITS], ids=str)
def test_16_bits_by_the_rule_of_the_weights(rule: PixelRule | None) -> None:
    levels = IMAGE.astype(np.uint16) * 16
    expected = to_uint8(levels, rule)
    np.testing.assert_array_equal(to_pixels(levels, pixels=rule), expected)
    encoded = cv2.imencode(".png", levels[..., ::-1])[1].tobytes()
    np.testing.assert_array_equal(to_pixels(encoded, pixels=rule), expected)
    grey = levels[..., 0]
    expected = np.repeat(to_uint8(grey, rule)[..., None], 3, 2)
    images = [Image.fromarray(grey), Image.fromarray(grey.astype(np.int32))]
    assert [image.mode for image in images] == ["I;16", "I"]
    for door in (*images, png(images[0])):
        np.testing.assert_array_equal(to_pixels(door, pixels=rule), expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((3, 40, 50), np.uint8), r"shape \(3, 40, 50\).*Channels come last: array\.transpose\(1, 2, 0\)"),
        (np.zeros((2, 40, 50, 3), np.uint8), r"shape \(2, 40, 50, 3\).*one by one"),
        (np.zeros((0, 50, 3), np.uint8), r"shape \(0, 50, 3\), expected \(height, width\)"),
        (np.array(3, np.uint8), r"shape \(\)"),
        (
            torch.ones(3, 40, 50).to_sparse(),
            r"tensor of torch\.float32, torch\.sparse_coo, on cpu, expected dense values",
        ),
        (torch.quantize_per_tensor(torch.ones(3, 40, 50), 1.0, 0, torch.quint8), r"torch\.quint8.*dequantize\(\)"),
        (torch.ones(3, 40, 50, device="meta"), "on meta, expected dense"),
        (torch.nested.nested_tensor([torch.ones(40, 50)]), "expected dense values"),
        (torch.ones(3, 40, 50, dtype=torch.complex64), "image of complex64"),
        (np.zeros((40, 50, 5), np.uint8), r"shape \(40, 50, 5\)"),
        (np.zeros((40, 50, 3), np.int64), r"image of int64, expected uint8, uint16"),
        (IMAGE.astype(np.float32), r"image of float32 up to 2\d\d, expected floats in 0 to 1\. Divide it"),
        (torch.from_numpy(IMAGE).permute(2, 0, 1).half(), "image of float16 up to 2.*or give it as uint8"),
        (torch.zeros(40, 50, 3), r"shape \(40, 50, 3\), expected \(height, width\) or \(1 to 4, height, width\)"),
        (b"no image", r"8 bytes: found 8 bytes that do not decode"),
        (b"", "that do not decode"),
        (Path("nowhere.jpg"), r"nowhere\.jpg: cannot read the image \(No such file"),
        (7.5, "found a float, expected an image"),
        (io.StringIO("text"), r'StringIO whose read\(\) returns str, expected bytes\. Open the file with mode "rb"'),
        (io.BytesIO(), r"found a BytesIO without further bytes, expected an image\. Go back with seek\(0\)"),
        (Image.open(io.BytesIO(png(Image.fromarray(IMAGE))[:700])), "cannot be read"),  # its file breaks off
    ],
)
def test_invalid_images(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        to_pixels(given)


def test_colour_order_is_of_arrays_alone() -> None:
    with pytest.raises(ConfigError, match="found bgr with a"):
        to_pixels(Path("a.png"), color="bgr")
    with pytest.raises(ConfigError, match="found 'grb', expected rgb or bgr"):
        to_pixels(IMAGE, color="grb")  # type: ignore[arg-type]


def test_the_first_dark_image_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    levels = IMAGE.astype(np.uint16) * 16
    cv2.imwrite(str(tmp_path / "dark.png"), levels)
    bright = IMAGE.astype(np.uint16) * 257
    note = DarkImageWarning()
    for image_, rule in ((IMAGE // 4, None), (bright, None), (np.zeros_like(bright), None), (levels, TWELVE_BITS)):
        to_pixels(image_, pixels=rule, note=note)
    assert caplog.text == ""
    for _ in range(2):
        to_pixels(tmp_path / "dark.png", note=note)
    (record,) = caplog.records
    assert f"{tmp_path / 'dark.png'}: dark, as" in record.getMessage() and "`pixels:`" in record.getMessage()
    for dark in (levels, (tmp_path / "dark.png").read_bytes(), Image.fromarray(levels[..., 0]), IMAGE / 1000):
        caplog.clear()
        to_pixels(dark, note=DarkImageWarning())
        assert ": dark, as" in caplog.text
