"""The architectures that YOLOv5 publishes beside its own family, as words, and their parameters by arithmetic.

A word is a layer: `C512` a 1×1 convolution to 512 channels, `K` 3×3, `D` 3×3 at stride 2, `S` the 6×6 stem; `B256x6`
six bottlenecks in a C3, `N` three that do not add their input; `R128x2` two bottlenecks one after the other, `r`
without adding; `P` SPPF, `Y` SPP; `M` maximum of 2×2, `M1` at stride 1, `Z` a row and a column of zeros; `U` twice the
size; `+6` joined with layer 6; `@17,20` the head. `^` before a word: it reads the layer before the last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

Row = list[Any]

FAMILY = "S64 D128 B128x3 D256 B256x6 D512 B512x9 "
P5 = f"{FAMILY} D1024 B1024x3 P1024 "
P6 = f"{FAMILY} D768 B768x3 D1024 B1024x3 P1024 "
P7 = f"{FAMILY} D768 B768x3 D1024 B1024x3 D1280 B1280x3 P1280 "
DARKNET = "K32 D64 R64x1 D128 R128x2 D256 R256x8 D512 R512x8 D1024 R1024x4 "
DARKNET_HEAD = (
    "K1024 C512 K1024 ^C256 U +8 r512x1 r512x1 C256 K512 ^C128 U +6 r256x1 r256x2 @27,22,15"  # behind layers 11 and 12
)
TO_P3 = "C512 U +6 N512 C256 U +4 N256 "
UP_FROM_P3 = "D256 +14 N512 D512 +10 N1024 @17,20,23"
WORDS = {
    "yolov3": f"{DARKNET} r1024x1 C512 {DARKNET_HEAD}",
    "yolov3-spp": f"{DARKNET} r1024x1 Y512 {DARKNET_HEAD}",
    "yolov3-tiny": "K16 M K32 M K64 M K128 M K256 M K512 Z M1 K1024 C256 K512 ^C128 U +8 K256 @19,15",
    "yolov5-bifpn": f"{P5} {TO_P3} D256 +14,6 N512 D512 +10 N1024 @17,20,23",
    "yolov5-fpn": f"{P5} N1024 U +6 C512 N512 U +4 C256 N256 @18,14,10",
    "yolov5-p2": f"{P5} {TO_P3} C128 U +2 N128 D128 +18 N256 D256 +14 N512 D512 +10 N1024 @21,24,27,30",
    "yolov5-p34": f"{P5} {TO_P3} D256 +14 N512 @17,20",
    "yolov5-p6": f"{P6} C768 U +8 N768 C512 U +6 N512 C256 U +4 N256 "
    "D256 +20 N512 D512 +16 N768 D768 +12 N1024 @23,26,29,32",
    "yolov5-p7": f"{P7} C1024 U +10 N1024 C768 U +8 N768 C512 U +6 N512 C256 U +4 N256 "
    "D256 +26 N512 D512 +22 N768 D768 +18 N1024 D1024 +14 N1280 @29,32,35,38,41",
    "yolov5-panet": f"{P5} {TO_P3} {UP_FROM_P3}",
    "yolov5s-LeakyReLU": f"{P5} {TO_P3} {UP_FROM_P3}",
    "yolov5s-ghost": f"{P5} {TO_P3} {UP_FROM_P3}",
    "yolov5s-transformer": f"{P5} {TO_P3} {UP_FROM_P3}",
}
# At 80 classes, with normalisation and with it folded in; known from outside: SPEC, and what the originals print.
PUBLISHED = {
    "yolov3": (61_949_149, 61_922_845),
    "yolov3-spp": (62_998_749, 62_971_933),
    "yolov3-tiny": (8_852_366, 8_849_182),
    "yolov5-p6": (76_770_172, None),
    "yolov5-panet": (46_563_709, 46_533_693),
    "yolov5s-LeakyReLU": (7_235_389, 7_225_885),
    "yolov5s-transformer": (7_235_389 + 7_277_885 - 7_276_605 - 4 * 256, None),  # printed with two LayerNorms more
}


def row(word: str) -> Row:
    """The row of a model YAML that a word stands for."""
    source, word = (-2, word[1:]) if word[0] == "^" else (-1, word)
    kind, first, repeats = re.fullmatch(r"(\D)(\d*)(?:x(\d+))?.*", word).groups()  # type: ignore[union-attr]
    width, times = int(first or 2), int(repeats or 3)
    layers = [int(layer) for layer in re.findall(r"\d+", word)]
    return {
        "C": [source, 1, "Conv", [width, 1, 1]],
        "K": [source, 1, "Conv", [width, 3, 1]],
        "D": [source, 1, "Conv", [width, 3, 2]],
        "S": [source, 1, "Conv", [width, 6, 2, 2]],
        "B": [source, times, "C3", [width]],
        "N": [source, times, "C3", [width, False]],
        "R": [source, times, "Bottleneck", [width]],
        "r": [source, times, "Bottleneck", [width, False]],
        "P": [source, 1, "SPPF", [width, 5]],
        "Y": [source, 1, "SPP", [width, [5, 9, 13]]],
        "M": [source, 1, "nn.MaxPool2d", [2, width, 0]],
        "Z": [source, 1, "nn.ZeroPad2d", [[0, 1, 0, 1]]],
        "U": [source, 1, "nn.Upsample", ["None", 2, "nearest"]],
        "+": [[-1, *layers], 1, "Concat", [1]],
        "@": [layers, 1, "Detect", ["nc", "anchors"]],
    }[kind]


def describe(name: str) -> dict[str, Any]:
    """The description of a published architecture, as its YAML holds it."""
    rows = [row(word) for word in WORDS[name].split()]
    small = name.startswith("yolov5s") or name == "yolov5-p34"
    if name == "yolov5s-ghost":
        for layer in rows[1:]:
            layer[2] = {"Conv": "GhostConv", "C3": "C3Ghost"}.get(layer[2], layer[2])
    if name == "yolov5s-transformer":
        rows[8][2] = "C3TR"
    described = {"nc": 80, "depth_multiple": 0.33 if small else 1.0, "width_multiple": 0.5 if small else 1.0}
    activation = {"activation": "nn.LeakyReLU(0.1)"} if name == "yolov5s-LeakyReLU" else {}
    return {**described, "anchors": 3, **activation, "backbone": rows[:1], "head": rows[1:]}


def parameters(described: dict[str, Any]) -> int:
    """How many parameters a description has, by arithmetic alone."""
    width, depth = described["width_multiple"], described["depth_multiple"]
    channels: list[int] = []
    total = 0
    for sources, repeats, module, arguments in (*described["backbone"], *described["head"]):
        first, *others = [channels[s] if channels else 3 for s in (sources if isinstance(sources, list) else [sources])]
        if module in ("Concat", "Detect"):
            total += sum(3 * 85 * (c + 1) for c in (first, *others)) if module == "Detect" else 0
            channels.append(sum((first, *others)))
        elif module.startswith("nn."):
            channels.append(first)
        else:
            out = math.ceil(arguments[0] * width / 8) * 8
            times = max(round(repeats * depth), 1) if repeats > 1 else 1
            kernel = arguments[1] if module in ("Conv", "GhostConv") else times
            total += BLOCKS[module](first, out, kernel)
            channels.append(out)
    return total


def conv(c_in: int, c_out: int, kernel: int = 1) -> int:
    return c_in * c_out * kernel**2 + 2 * c_out


def ghost(c_in: int, c_out: int, kernel: int = 1) -> int:
    """A convolution to half of the channels, 5×5 numbers for each of them, and both halves' normalisation."""
    return conv(c_in, c_out // 2, kernel) + conv(1, c_out // 2, 5)


def csp(c_in: int, c_out: int, deep: int) -> int:
    return 2 * conv(c_in, c_out // 2) + conv(c_out, c_out) + deep


def bottleneck(c_in: int, c_out: int, hidden: int) -> int:
    return conv(c_in, hidden) + conv(hidden, c_out, 3)


def chain(c_in: int, c_out: int, times: int) -> int:
    return bottleneck(c_in, c_out, c_out // 2) + (times - 1) * bottleneck(c_out, c_out, c_out // 2)


def attention(c: int, layers: int) -> int:
    """Queries, keys, values, projected once more with a bias, joined, two linear layers; a linear layer before all."""
    return layers * (3 * c**2 + 3 * (c**2 + c) + c**2 + c + 2 * c**2) + c**2 + c


BLOCKS: dict[str, Callable[[int, int, int], int]] = {
    "Conv": conv,
    "GhostConv": ghost,
    "Bottleneck": chain,
    "C3": lambda i, o, n: csp(i, o, n * bottleneck(o // 2, o // 2, o // 2)),
    "C3Ghost": lambda i, o, n: csp(i, o, n * (ghost(o // 2, o // 4) + ghost(o // 4, o // 2))),
    "C3TR": lambda i, o, n: csp(i, o, attention(o // 2, n)),
    "SPP": lambda i, o, _: conv(i, i // 2) + conv(i // 2 * 4, o),
    "SPPF": lambda i, o, _: conv(i, i // 2) + conv(i // 2 * 4, o),
}
