"""Architectures that YOLOv5 publishes besides its own family build, with their numbers of parameters.

A word is a layer: `C512` a 1×1 convolution to 512 channels, `K` 3×3, `D` 3×3 at stride 2, `S` the 6×6 stem; `B256x6`
six bottlenecks in a C3, `N` three that do not add their input; `R128x2` two bottlenecks one after the other, `r`
without adding; `P` SPPF, `Y` SPP; `M` maximum of 2×2, `M1` at stride 1, `Z` a row and a column of zeros; `U` twice the
size; `+6` concatenated with layer 6; `@17,20` the head. `^` before a word: it reads the layer before the last.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tessera.models.detector import DetectionModel, check_imgsz, count_gflops, count_parameters, predict_augmented

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
}
# Parameters at 80 classes, with normalisation and with it folded in; as SPEC and the originals print them, or counted.
PARAMETERS = {
    "yolov3": (61_949_149, 61_922_845),
    "yolov3-spp": (62_998_749, 62_971_933),
    "yolov3-tiny": (8_852_366, 8_849_182),
    "yolov5-bifpn": (46_825_853, 46_795_837),
    "yolov5-fpn": (41_117_565, 41_090_877),
    "yolov5-p2": (47_575_804, 47_543_612),
    "yolov5-p34": (5_331_518, 5_323_806),
    "yolov5-p6": (76_770_172, 76_726_332),
    "yolov5-p7": (144_281_723, 144_216_251),
    "yolov5-panet": (46_563_709, 46_533_693),
    "yolov5s-LeakyReLU": (7_235_389, 7_225_885),
}


def row(word: str) -> list[Any]:
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
    described = {"nc": 80, "depth_multiple": 0.33 if small else 1.0, "width_multiple": 0.5 if small else 1.0}
    activation = {"activation": "nn.LeakyReLU(0.1)"} if name == "yolov5s-LeakyReLU" else {}
    return {**described, "anchors": 3, **activation, "backbone": rows[:1], "head": rows[1:]}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_a_published_architecture(name: str) -> None:
    with torch.device("meta"):
        model = DetectionModel({"name": name, **describe(name)})
    assert (count_parameters(model), count_parameters(model.fuse())) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "strides", "stride"),
    [("yolov5-p34", (8, 16), 32), ("yolov3-tiny", (16, 32), 32), ("yolov5-p2", (4, 8, 16, 32), 32)],
)
def test_images_are_multiples_of_all_maps_and_not_of_those_of_the_head_alone(
    name: str, strides: tuple[int, ...], stride: int
) -> None:
    """The backbone of yolov5-p34 goes down to stride 32; yolov3-tiny has a map of one row and column more than that."""
    model = DetectionModel({**describe(name), "width_multiple": 0.0625}, nc=3).eval()
    assert model.head.strides == strides and model.stride == stride
    assert count_gflops(model, 64) == pytest.approx(4 * count_gflops(model, 32)) != 0
    found = predict_augmented(model, torch.rand(1, 3, 64, 96))  # sides of its own at 0.83 and 0.67
    assert found.shape[1] > 0 and bool(found.isfinite().all())


def test_a_map_that_the_head_does_not_read_may_be_coarser_than_32() -> None:
    model = DetectionModel({**describe("yolov5-p6"), "width_multiple": 0.0625}, nc=3)
    assert model.stride == 64
    described = {**model.yaml, "head": [*model.yaml["head"][:-1], [[23, 26], 1, "DetectFree", ["nc"]]]}
    del described["anchors"]
    finer = DetectionModel(described)
    assert (finer.head.strides, finer.stride, check_imgsz(96, finer.stride)) == ((8, 16), 64, 128)
