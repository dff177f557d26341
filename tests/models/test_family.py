"""Parameters and GFLOPs of all families: tessera, YOLOv5, YOLOX, YOLOv9, and backbones with the anchor-free head."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessera.models.detector import DetectionModel, count_gflops, count_parameters, summary
from tessera.models.heads.free import DetectFree, DetectYOLOv9
from tessera.models.heads.head import Head
from tessera.models.heads.yolox import DetectYOLOX
from tessera.models.layers.elan import RepConv
from tessera.models.model_yaml import MODELS_DIR
from tessera.utils.config import load_hyp
from tessera.utils.yaml_file import read_yaml

HYP = load_hyp("hyp.short.yaml")
# Parameters and GFLOPs at 80 classes and 640 px.
FAMILY = {
    "tessera-n": (2_538_624, 6.63),
    "tessera-s": (10_077_008, 25.99),
    "tessera-m": (24_379_296, 75.36),
    "tessera-l": (42_029_296, 160.82),
    "tessera-x": (65_620_672, 250.93),
    "yolox-nano": (912_159, 2.51),
    "yolox-tiny": (5_055_855, 15.22),
    "yolox-s": (8_968_255, 26.75),
    "yolox-m": (25_326_495, 73.64),
    "yolox-l": (54_208_895, 155.47),
    "yolox-x": (99_071_455, 281.67),
    "yolov9-t": (2_442_624, 9.94),
    "yolov9-s": (7_226_192, 26.79),
    "yolov9-m": (20_123_984, 76.94),
    "yolov9-c": (25_498_736, 102.99),
}
AT_3_CLASSES = {  # and 320 px
    "tessera-n": (2_523_609, 1.64),
    "yolox-nano": (897_144, 0.61),
    "yolov9-t": (2_412_825, 2.44),
}
# Of YOLOv9's main branch folded, as its users counted it (WongKinYiu/yolov9 issue 505), less the 16 fixed bins.
FOLDED = {"yolov9-t": 2_407_632 - 16, "yolov9-s": 7_105_888 - 16, "yolov9-m": 19_978_672 - 16}

# What YOLOv5 publishes: parameters at 80 classes, those once folded, and GFLOPs at 640 px.
YOLOV5 = {
    "n": (1_872_157, 1_867_405, 4.5),
    "s": (7_235_389, 7_225_885, 16.5),
    "m": (21_190_557, 21_172_173, 49.0),
    "l": (46_563_709, 46_533_693, 109.1),
    "x": (86_749_405, 86_705_005, 205.7),
    "n6": (3_246_940, None, None),
    "s6": (12_626_620, None, None),
    "m6": (35_731_932, None, None),
    "l6": (76_770_172, None, None),
    "x6": (140_794_780, None, None),
}


@pytest.mark.parametrize("size", YOLOV5)
def test_parameters_and_gflops_of_yolov5(size: str) -> None:
    parameters, folded, gflops = YOLOV5[size]
    with torch.device("meta"):
        model = DetectionModel(f"yolov5{size}")
    assert model.nc == 80 and model.head.strides == (8, 16, 32, 64)[: 4 if size.endswith("6") else 3]
    assert count_parameters(model) == parameters
    assert gflops is None or count_gflops(model, 640) == pytest.approx(gflops, abs=0.051)
    assert folded is None or count_parameters(model.fuse()) == folded


def head_of(name: str) -> type[Head]:
    """The head that a model's name stands for."""
    if name.startswith("yolov9"):
        return DetectYOLOv9
    return DetectYOLOX if name.startswith("yolox") else DetectFree


ROWS = [(80, 640, *row) for row in FAMILY.items()] + [(3, 320, *row) for row in AT_3_CLASSES.items()]


@pytest.mark.parametrize(("nc", "imgsz", "name", "expected"), ROWS)
def test_parameters_and_gflops(nc: int, imgsz: int, name: str, expected: tuple[int, float]) -> None:
    parameters, gflops = expected
    with torch.device("meta"):
        model = DetectionModel(name, nc=nc)
    assert type(model.head) is head_of(name) and model.head.strides == (8, 16, 32)
    assert count_parameters(model) == parameters
    assert count_gflops(model, imgsz) == pytest.approx(gflops, abs=0.0051)
    normalised = sum(m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    # A bias for a weight and a bias; of two branches, one.
    branches = [m.cv2.conv for m in model.modules() if isinstance(m, RepConv) and m.cv2 is not None]
    folded = parameters - normalised - sum(conv.weight.numel() + conv.out_channels for conv in branches)
    assert count_parameters(model.fuse()) == folded
    assert folded == FOLDED.get(name, folded) or nc != 80
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())


def test_sizes_differ_in_multiples_and_in_channels_of_the_deepest_stage() -> None:
    caps = {"n": 1024, "s": 1024, "m": 768, "l": 512, "x": 512}
    first = read_yaml(MODELS_DIR / "tessera-n.yaml", "").values
    for size, cap in caps.items():
        values = read_yaml(MODELS_DIR / f"tessera-{size}.yaml", "").values
        for part in ("backbone", "head"):
            expected = [[*row[:3], [cap if value == 1024 else value for value in row[3]]] for row in first[part]]
            assert values[part] == expected


def test_summary_line_and_that_the_model_stays_as_it_was() -> None:
    model = DetectionModel("yolov5n")
    model.model[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert summary(model) == "yolov5n: 214 layers, 1,872,157 parameters, 4.5 GFLOPs"
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert summary(model.fuse()).startswith("yolov5n: 157 layers, 1,867,405 parameters")
