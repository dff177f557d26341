"""YOLOX weights (Ge et al., arXiv 2107.08430; Megvii, Apache-2.0): a backbone as YOLOv5's, with its own head.

YOLOX expects BGR in 0 … 255. The first convolution is converted to RGB in 0 … 1: channels are reversed within each of
the four pixels that it joins, and weights are multiplied by 255, up to rounding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from tessera.deploy.foreign.tensors import ConvertedWeights, WrongTensors, reject_tensor, require_shape, shape_of
from tessera.models.model_yaml import MODELS_DIR
from tessera.utils.text import first_of, shown
from tessera.utils.yaml_file import read_yaml

MARKER = "backbone.backbone.stem.conv.conv.weight"
EXPECTED_SIZES = "nano, tiny, s, m, l and x"

_LAYERS = {
    "backbone.backbone.stem": 0,
    "backbone.backbone.dark2.0": 1,
    "backbone.backbone.dark2.1": 2,
    "backbone.backbone.dark3.0": 3,
    "backbone.backbone.dark3.1": 4,
    "backbone.backbone.dark4.0": 5,
    "backbone.backbone.dark4.1": 6,
    "backbone.backbone.dark5.0": 7,
    "backbone.backbone.dark5.1": 8,
    "backbone.backbone.dark5.2": 9,
    "backbone.lateral_conv0": 10,
    "backbone.C3_p4": 13,
    "backbone.reduce_conv1": 14,
    "backbone.C3_p3": 17,
    "backbone.bu_conv2": 18,
    "backbone.C3_n3": 20,
    "backbone.bu_conv1": 21,
    "backbone.C3_n4": 23,
}
_HEAD = "model.24"
_BRANCHES = {  # of the head, by level
    "stems": "stems.{level}",
    "cls_convs": "cls.{level}",
    "cls_preds": "cls.{level}.2",
    "reg_convs": "box.{level}",
    "reg_preds": "offsets.{level}",
    "obj_preds": "objectness.{level}",
}
_BACKBONE_NAME = re.compile(rf"({'|'.join(map(re.escape, _LAYERS))})\.(.+)")
_HEAD_NAME = re.compile(rf"head\.({'|'.join(_BRANCHES)})\.([0-2])\.(.+)")
_DEEPEST = "backbone.backbone.dark5"
_PIXELS = 4  # joined by the first convolution
_LEVELS = 255.0
_STEM, _REPEATS = 64, 3  # channels and bottlenecks at multiple 1
_MOST_REPEATS = 12  # bottlenecks of the first stage; three times YOLOX-x's
# By stem, bottlenecks, and whether 3×3 convolutions are depth-wise separable.
_SIZES = {
    (16, 1, True): "nano",
    (24, 1, False): "tiny",
    (32, 1, False): "s",
    (48, 2, False): "m",
    (64, 3, False): "l",
    (80, 4, False): "x",
}


def convert(tensors: Mapping[str, Tensor]) -> ConvertedWeights:
    """Return the weights under this program's names and for its images.

    Raises:
        WrongTensors: a tensor has no counterpart.
    """
    state = {_renamed(name): tensor for name, tensor in tensors.items()}
    first = shape_of(tensors, MARKER, 4)
    if first[1] != 3 * _PIXELS:
        reject_tensor(MARKER, first, f"{3 * _PIXELS} input channels, for RGB")
    stem = "model.0.conv.conv.weight"
    state[stem] = state[stem].unflatten(1, (_PIXELS, 3)).flip(2).flatten(1, 2) * _LEVELS
    channels, bottlenecks = first[0], _bottlenecks(tensors)
    separable = f"{_DEEPEST}.0.pconv.conv.weight" in tensors
    if separable:
        require_shape(tensors, f"{_DEEPEST}.1.conv2.conv.weight", (16 * channels, 32 * channels, 1, 1))
    else:
        require_shape(tensors, f"{_DEEPEST}.0.conv.weight", (16 * channels, 8 * channels, 3, 3))
    nc = shape_of(tensors, "head.cls_preds.0.weight", 4)[0]
    require_shape(tensors, "head.cls_preds.0.weight", (nc, 4 * channels, 1, 1))
    size = _SIZES.get((channels, bottlenecks, separable))
    plan = size or ("nano" if separable else "s")
    described = {**read_yaml(MODELS_DIR / f"yolox-{plan}.yaml", "a model").values, "nc": nc, "name": "yolox"}
    if size is None:  # not a published size
        multiples = {"depth_multiple": bottlenecks / _REPEATS, "width_multiple": channels / _STEM}
        return ConvertedWeights(state, described | multiples)
    return ConvertedWeights(state, described | {"name": f"yolox-{size}"})


def _renamed(name: str) -> str:
    if found := _BACKBONE_NAME.fullmatch(name):
        return re.sub(r"\bconv([1-3])\b", r"cv\1", f"model.{_LAYERS[found[1]]}.{found[2]}")
    if found := _HEAD_NAME.fullmatch(name):
        return f"{_HEAD}.{_BRANCHES[found[1]].format(level=found[2])}.{found[3]}"
    raise WrongTensors(f"{shown(name)} has no place in YOLOX {EXPECTED_SIZES}")


def _bottlenecks(tensors: Mapping[str, Tensor]) -> int:
    """Return the bottlenecks of the first stage, which determine the depth."""
    found = {int(m[1]) for name in tensors if (m := re.match(r"backbone\.backbone\.dark2\.1\.m\.(\d{1,3})\.", name))}
    if found != set(range(len(found))) or not 0 < len(found) <= _MOST_REPEATS:
        listed = first_of([str(index) for index in sorted(found)], 8)
        raise WrongTensors(
            f"its first stage has the bottlenecks {listed or 'none'}, expected 0 to at most {_MOST_REPEATS - 1}"
        )
    return len(found)
