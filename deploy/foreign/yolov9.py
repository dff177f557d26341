"""YOLOv9 weights of the authors' MIT release (Wang et al., arXiv 2402.13616; MultimediaTechLab/YOLO): t, s, m, c.

The auxiliary branch, used in training alone and missing in some files, is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from tessera.deploy.foreign.tensors import ConvertedWeights, WrongTensors, reject_tensor, require_shape, shape_of
from tessera.models.model_yaml import MODELS_DIR
from tessera.utils.text import shown
from tessera.utils.yaml_file import read_yaml

_MOST_SIDES = 4 * 64  # bins of all sides, at most

MARKER = "22.heads.0.class_conv.0.conv.weight"
EXPECTED_SIZES = "t, s, m and c"
_CLASSES, _BOXES = "22.heads.0.class_conv.2.weight", "22.heads.0.anchor_conv.2.weight"

_HEAD = 22  # layer of the head; later ones are the auxiliary branch
_SPP = 9
_NAME = re.compile(r"(\d{1,3})\.(.+)")
_BRANCHES = {"anchor_conv": "box", "class_conv": "cls"}
_HEAD_NAME = re.compile(rf"heads\.([0-2])\.({'|'.join(_BRANCHES)})\.(.+)")
_BINS = re.compile(r"heads\.[0-2]\.anc2vec\.anc2vec\.weight")
_SIZES = {(16, True): "t", (32, True): "s", (32, False): "m", (64, False): "c"}  # by stem and kind of layer 2


def convert(tensors: Mapping[str, Tensor]) -> ConvertedWeights:
    """Return the weights under this program's names, without the auxiliary branch.

    Raises:
        WrongTensors: a tensor has no counterpart.
    """
    state = {}
    for name, tensor in tensors.items():
        found = _NAME.fullmatch(name)
        if found is None:
            raise WrongTensors(f"{shown(name)} has no place in YOLOv9 {EXPECTED_SIZES}")
        index, rest = int(found[1]), found[2]
        if index == _HEAD and _BINS.fullmatch(rest):
            # The bins' distances are no parameters here.
            if not torch.equal(tensor.flatten(), torch.arange(tensor.numel(), dtype=tensor.dtype)):
                raise WrongTensors(f"{name} is not 0, 1, 2 …, as in YOLOv9")
        elif index <= _HEAD:
            state[f"model.{index}.{_renamed(index, rest)}"] = tensor
    stem, simple = shape_of(tensors, "0.conv.weight", 4)[0], "2.conv2.conv.weight" in tensors
    size = _SIZES.get((stem, simple))
    if size is None:
        reject_tensor("0.conv.weight", f"of {stem} channels", "16 (YOLOv9-t), 32 (s, m) or 64 (c)")
    width, classes, boxes = (shape_of(tensors, name, 4)[0] for name in (MARKER, _CLASSES, _BOXES))
    require_shape(tensors, "22.heads.0.class_conv.1.conv.weight", (width, width, 3, 3))
    require_shape(tensors, _CLASSES, (classes, width, 1, 1))
    if boxes % 4 or boxes > _MOST_SIDES:
        reject_tensor(_BOXES, f"of {boxes} channels", f"4 to {_MOST_SIDES}, a multiple of 4")
    described = dict(read_yaml(MODELS_DIR / f"yolov9-{size}.yaml", "a model").values)
    *rows, (sources, repeats, module, _) = described["head"]
    head = [sources, repeats, module, ["nc", width, boxes // 4]]
    return ConvertedWeights(state, {**described, "head": [*rows, head], "nc": classes, "name": f"yolov9-{size}"})


def _renamed(index: int, name: str) -> str:
    """Return a tensor's name without its layer's number."""
    if index == _HEAD:
        found = _HEAD_NAME.fullmatch(name)
        if found is None:
            raise WrongTensors(f"{shown(f'{index}.{name}')} has no place in YOLOv9's head")
        return f"one_to_many.{_BRANCHES[found[2]]}.{found[1]}.{found[3]}"
    if index == _SPP:
        name = name.replace("conv5.", "cv2.", 1)
    return re.sub(r"\bbottleneck\b", "m", re.sub(r"\bconv([1-4])\b", r"cv\1", name))
