"""Conversion of input images of any kind to the pixels that training and validation use.

Grey becomes three equal channels, a palette its colours, CMYK the RGB of OpenCV's JPEG decoder; alpha is dropped. EXIF
orientation is applied. utils/bit_depth.py converts more than 8 bits to 8.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tessera.data.source.decode import decode_raw_pixels, read_raw_pixels
from tessera.utils.bit_depth import DARK, PixelRule, Pixels, levels_of_image, max_finite_level, to_uint8
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.text import plural, shown

log = logging.getLogger(__name__)

Color = Literal["rgb", "bgr"]
ImageInput = str | Path | bytes | IO[bytes] | Image.Image | NDArray[Any] | Tensor

_DTYPES = (np.uint8, np.uint16, np.float16, np.float32, np.float64)
_CHANNELS = (1, 2, 3, 4)  # grey, grey and alpha, colours, colours and alpha
_MAX_FLOAT = 1.5  # resampled floats exceed 1, but by less


class DarkImageWarning:
    """A warning, logged once, that images with more than 8 bits become dark without a `pixels` rule."""

    def __init__(self) -> None:
        self._is_logged = False

    def check(self, levels: NDArray[Any], pixels: Pixels, name: str) -> None:
        """Warn where the levels of an image became dark pixels."""
        if self._is_logged or levels.dtype == np.uint8 or (byte := int(pixels.max())) >= DARK:
            return
        level = max_finite_level(levels)
        if level > 0:
            self._is_logged = True
            log.warning(
                f"{name}: dark, as its brightest level {level:g} of more than 8 bits becomes {byte} of 255; further "
                "images are not reported. Give the range of levels with `pixels:` in the dataset YAML of the "
                "training (docs/detect.md), or use images of 8 bits."
            )


def to_pixels(
    image: ImageInput, *, color: Color = "rgb", pixels: PixelRule | None = None, note: DarkImageWarning | None = None
) -> Pixels:
    """Convert an image to uint8 (H, W, 3) RGB.

    Args:
        image: path or bytes of a file, open file, PIL image, array (H, W) or (H, W, 1 to 4), or tensor (H, W) or
            (1 to 4, H, W); of uint8, uint16, or floats in 0 … 1. A UserError where it is none of these.
        color: channel order of an array or tensor.
        pixels: rule for more than 8 bits.
        note: warns of dark images.
    """
    if color not in get_args(Color):
        raise ConfigError(f"color: found {shown(color)}, expected rgb or bgr.")
    image = content_of(image)
    if isinstance(image, Tensor):
        return _of_array(_array_of_tensor(image), color, pixels, "tensor", note)
    if isinstance(image, np.ndarray):
        return _of_array(image, color, pixels, "array", note)
    if color != "rgb":
        raise ConfigError(f"color: found bgr with a {type(image).__name__}, expected it with arrays and tensors only.")
    if isinstance(image, (str, Path)):
        return _eight_bits(read_raw_pixels(Path(image)), pixels, note, str(image))
    if isinstance(image, (bytes, bytearray, memoryview)):
        name = plural(len(image), "byte")
        return _eight_bits(decode_raw_pixels(bytes(image), name), pixels, note, name)
    if isinstance(image, Image.Image):
        return _of_array(_array_of_image(image), "rgb", pixels, "PIL image", note)
    raise UserError(
        f"found a {type(image).__name__}, expected an image: a path, bytes, a PIL image, a NumPy array or a tensor."
    )


def content_of(image: Any) -> Any:
    """Return the bytes of an open file, such as an upload of a web application; anything else unchanged."""
    if not hasattr(image, "read"):
        return image
    kind, content = type(image).__name__, image.read()
    if not isinstance(content, bytes):
        raise UserError(
            f"found a {kind} whose read() returns {type(content).__name__}, expected bytes. Open the file with "
            'mode "rb", or await its read() and give the bytes.'
        )
    if not content:
        raise UserError(
            f"found a {kind} without further bytes, expected an image. Go back with seek(0), if it has one."
        )
    return content


def _eight_bits(levels: NDArray[Any], rule: PixelRule | None, note: DarkImageWarning | None, name: str) -> Pixels:
    pixels = to_uint8(levels, rule)
    if note is not None and rule is None:
        note.check(levels, pixels, name)
    return pixels


def _of_array(
    array: NDArray[Any], color: Color, rule: PixelRule | None, what: str, note: DarkImageWarning | None
) -> Pixels:
    """Convert levels (H, W) or (H, W, channels); uint8 (H, W, 3) RGB is returned without a copy."""
    channels = array.shape[-1] if array.ndim == 3 else 1
    if array.ndim not in (2, 3) or channels not in _CHANNELS or 0 in array.shape:
        hint = ""
        if array.ndim == 3 and array.shape[0] in _CHANNELS and what == "array":
            hint = " Channels come last: array.transpose(1, 2, 0)."
        elif array.ndim == 4:
            hint = " Give the images of a batch one by one, as a list."
        expected = "(1 to 4, height, width)" if what == "tensor" else "(height, width, 1 to 4)"
        shape = array.transpose(2, 0, 1).shape if what == "tensor" and array.ndim == 3 else array.shape
        raise UserError(f"found an image of shape {shape}, expected (height, width) or {expected}.{hint}")
    if array.dtype not in _DTYPES:
        raise UserError(
            f"found an image of {array.dtype}, expected uint8, uint16, or floats in 0 to 1. Convert it first."
        )
    if rule is None and np.issubdtype(array.dtype, np.floating):
        largest = max_finite_level(array)
        if largest > _MAX_FLOAT:
            raise UserError(
                f"found an image of {array.dtype} up to {largest:g}, expected floats in 0 to 1. Divide it by its "
                "largest possible level, such as 255, or give it as uint8."
            )
    levels = array if array.ndim == 3 else array[..., None]
    if channels < 3:
        levels = np.repeat(levels[..., :1], 3, axis=2)
    elif color == "bgr":
        levels = levels[..., 2::-1]
    else:
        levels = levels[..., :3]
    return np.ascontiguousarray(_eight_bits(levels, rule, note, f"a {what}"))


def _array_of_tensor(image: Tensor) -> NDArray[Any]:
    try:
        if image.layout is not torch.strided or image.is_quantized or image.is_nested or image.is_meta:
            raise TypeError
        host = image.detach().cpu()
        host = host.float() if host.dtype == torch.bfloat16 else host
        array: NDArray[Any] = (host.permute(1, 2, 0) if host.ndim == 3 else host).numpy()
    except TypeError as error:  # of NumPy for a type that it lacks
        raise UserError(
            f"found a tensor of {image.dtype}, {image.layout}, on {image.device}, expected dense values of uint8, "
            "uint16, or floats in 0 to 1. Convert it first, such as by to_dense() or dequantize()."
        ) from error
    return array


def _array_of_image(image: Image.Image) -> NDArray[Any]:
    try:
        return levels_of_image(image)
    except (OSError, SyntaxError, ValueError) as error:  # PIL reads a file when its pixels are requested
        raise UserError(f"{getattr(image, 'filename', '') or 'a PIL image'}: cannot be read ({error}).") from error
