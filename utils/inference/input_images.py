"""Pictures of every kind become the pixels that training and validation would see.

Grey becomes three equal channels, a palette its colours, CMYK the RGB of OpenCV's JPEG decoder; alpha is dropped. Files
and PIL images are turned as their EXIF orientation says. Levels of more than 8 bits become 8 by utils/bit_depth.py.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tessera.data.source.decode import decode_levels, read_levels
from tessera.utils.bit_depth import DARK, PixelRule, Pixels, brightest_level, levels_of_image, to_uint8
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.text import counted, shown

log = logging.getLogger(__name__)

Color = Literal["rgb", "bgr"]
Picture = str | Path | bytes | Image.Image | NDArray[Any] | Tensor

_DTYPES = (np.uint8, np.uint16, np.float16, np.float32, np.float64)
_CHANNELS = (1, 2, 3, 4)  # grey, grey and alpha, colours, colours and alpha
_MOST_SHARE = 1.5  # resampling leaves shares of the brightest that are above 1, but not by so much


class DarkNote:
    """Tells once, in the log, that pictures with more than 8 bits come dark."""

    def __init__(self) -> None:
        self._told = False

    def look(self, levels: NDArray[Any], pixels: Pixels, name: str) -> None:
        """At the levels of a picture, without a rule, and what became of them."""
        if self._told or levels.dtype == np.uint8 or (byte := int(pixels.max())) >= DARK:
            return
        level = brightest_level(levels)
        if level > 0:
            self._told = True
            log.warning(
                f"{name}: more than 8 bits, and its brightest level is {level:g}, which becomes {byte} of 255: it "
                "comes dark; further ones are not named. Say what the levels fill with `pixels:` in the data YAML of "
                "the training (docs/detect.md), or give pictures of 8 bits."
            )


def to_pixels(
    picture: Picture, *, color: Color = "rgb", pixels: PixelRule | None = None, note: DarkNote | None = None
) -> Pixels:
    """A picture as uint8 (H, W, 3) RGB.

    Args:
        picture: the path of a file; the bytes of one; a PIL image; an array (H, W) or (H, W, 1 to 4) or a tensor (H, W)
            or (1 to 4, H, W) of uint8, uint16, or floats in 0 … 1.
        color: the order of an array's or tensor's channels.
        pixels: for levels of more than 8 bits.
        note: tells where they come dark.

    Raises:
        UserError: the file cannot be read, or it is no picture; floats without a rule are far above 1.
        ConfigError: `color` is unknown, or the picture is of a kind that has an order of its own.
    """
    if color not in get_args(Color):
        raise ConfigError(f"color: found {shown(color)}, expected rgb or bgr.")
    if isinstance(picture, Tensor):
        return _of_array(_array_of_tensor(picture), color, pixels, "tensor", note)
    if isinstance(picture, np.ndarray):
        return _of_array(picture, color, pixels, "array", note)
    if color != "rgb":
        raise ConfigError(
            f"color: found bgr with a {type(picture).__name__}, expected it with arrays and tensors alone."
        )
    if isinstance(picture, (str, Path)):
        return _eight_bits(read_levels(Path(picture)), pixels, note, str(picture))
    if isinstance(picture, (bytes, bytearray, memoryview)):
        name = f"{counted(len(picture), 'byte')}"
        return _eight_bits(decode_levels(np.frombuffer(picture, np.uint8), name), pixels, note, name)
    if isinstance(picture, Image.Image):
        return _of_array(_array_of_image(picture), "rgb", pixels, "PIL image", note)
    raise UserError(
        f"found a {type(picture).__name__}, expected a picture: a path, bytes, a PIL image, a NumPy array or a tensor."
    )


def _eight_bits(levels: NDArray[Any], rule: PixelRule | None, note: DarkNote | None, name: str) -> Pixels:
    pixels = to_uint8(levels, rule)
    if note is not None and rule is None:
        note.look(levels, pixels, name)
    return pixels


def _of_array(array: NDArray[Any], color: Color, rule: PixelRule | None, what: str, note: DarkNote | None) -> Pixels:
    """Levels (H, W) or (H, W, channels) as pixels; the very array where it has that form already."""
    channels = 1 if array.ndim == 2 else array.shape[-1]
    if array.ndim not in (2, 3) or channels not in _CHANNELS or 0 in array.shape:
        hint = ""
        if array.ndim == 3 and array.shape[0] in _CHANNELS and what == "array":
            hint = " Channels come last: array.transpose(1, 2, 0)."
        elif array.ndim == 4:
            hint = " Give the pictures of a batch one by one, as a list."
        expected = "(1 to 4, height, width)" if what == "tensor" else "(height, width, 1 to 4)"
        shape = array.transpose(2, 0, 1).shape if what == "tensor" and array.ndim == 3 else array.shape
        raise UserError(f"found a picture of shape {shape}, expected (height, width) or {expected}.{hint}")
    if array.dtype not in _DTYPES:
        raise UserError(
            f"found a picture of {array.dtype}, expected uint8, uint16, or floats in 0 to 1. Convert it first."
        )
    if rule is None and np.issubdtype(array.dtype, np.floating):
        largest = brightest_level(array)
        if largest > _MOST_SHARE:
            raise UserError(
                f"found a picture of {array.dtype} up to {largest:g}, expected floats in 0 to 1. Divide it by its "
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


def _array_of_tensor(tensor: Tensor) -> NDArray[Any]:
    """Channels last, on the host."""
    host = tensor.detach().cpu()
    if host.dtype == torch.bfloat16:
        host = host.float()
    return (host.permute(1, 2, 0) if host.ndim == 3 else host).numpy()


def _array_of_image(image: Image.Image) -> NDArray[Any]:
    try:
        return levels_of_image(image)
    except (OSError, SyntaxError, ValueError) as error:  # PIL reads a file when its pixels are asked for
        raise UserError(f"{getattr(image, 'filename', '') or 'a PIL image'}: cannot be read ({error}).") from error
