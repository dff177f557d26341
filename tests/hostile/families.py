"""Weight files of YOLOX and YOLOv9 that are cut, flipped, or hold other tensors than their families have."""

from __future__ import annotations

import functools
import io
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.models.description import MODELS_DIR
from tessera.models.detector import DetectionModel
from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.yaml_file import read_yaml
from tests.hostile.damages import cut, flipped, named, pickle_changed
from tests.hostile.expect import Message, message_or_result

CASES, FAST_CASES = 1500, 12

STAGES = {  # layer of a model YAML and its place in YOLOX's code
    **dict(enumerate(("stem", "dark2.0", "dark2.1", "dark3.0", "dark3.1", "dark4.0", "dark4.1"))),
    7: "dark5.0",
    8: "dark5.1",
    9: "dark5.2",
}
NECK = {10: "lateral_conv0", 13: "C3_p4", 14: "reduce_conv1", 17: "C3_p3", 18: "bu_conv2", 20: "C3_n3", 21: "bu_conv1"}
PLACES = {i: f"backbone.backbone.{name}" for i, name in STAGES.items()} | {
    i: f"backbone.{name}" for i, name in {**NECK, 23: "C3_n4"}.items()
}
HEAD = (  # ours, theirs
    (r"stems\.(\d)", r"head.stems.\1"),
    (r"cls\.(\d)\.2", r"head.cls_preds.\1"),
    (r"cls\.(\d)", r"head.cls_convs.\1"),
    (r"box\.(\d)", r"head.reg_convs.\1"),
    (r"offsets\.(\d)", r"head.reg_preds.\1"),
    (r"objectness\.(\d)", r"head.obj_preds.\1"),
)


def prepare() -> None:
    """Make the files once, before the first case is forked."""
    for family in ("YOLOX", "YOLOv9"):
        whole(family)


def trial(rng: random.Random, folder: Path) -> str:
    """Damage a file in one way, then take its weights, as val.py does."""
    family, damage = rng.choice(("YOLOX", "YOLOX", "YOLOv9")), rng.choice([*_OF_BYTES, "confused"])
    path = folder / rng.choice(("yolox_s.pth", "v9-t.pt"))
    path.write_bytes(_OF_BYTES[damage](rng, whole(family)) if damage in _OF_BYTES else _confused_tensors(rng, family))
    used = message_or_result(lambda: take(path))
    if damage == "cut":
        assert isinstance(used, Message), "loaded, and nothing was reported"
    assert [*folder.iterdir()] == [path], "something was left behind"
    return f"{family}, {damage}"


def take(path: Path) -> str:
    """A model with the file's weights; all of them are numbers."""
    weights = load_weights(path)
    model = model_of_weights(weights, str(path))
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    assert all(tensor.dtype == torch.float32 for tensor in model.parameters())
    return weights.source


@functools.cache
def tensors(family: str) -> dict[str, Tensor]:
    """Of a small YOLOX, or of YOLOv9-t, by the names of their own code."""
    torch.manual_seed(0)
    if family == "YOLOX":
        values = read_yaml(MODELS_DIR / "yolox-s.yaml", "").values
        model = DetectionModel({**values, "depth_multiple": 1 / 3, "width_multiple": 0.125})
        return {_yolox_name(name): tensor for name, tensor in model.state_dict().items()}
    return {_yolov9_name(name): tensor for name, tensor in DetectionModel("yolov9-t.yaml").state_dict().items()}


def _yolox_name(name: str) -> str:
    _, layer, rest = name.split(".", 2)
    if int(layer) in PLACES:
        return f"{PLACES[int(layer)]}.{rest.replace('cv', 'conv')}"
    ours, theirs = next(pair for pair in HEAD if re.match(pair[0], rest))
    return re.sub(ours, theirs, rest, count=1)


def _yolov9_name(name: str) -> str:
    _, layer, rest = name.split(".", 2)
    rest = re.sub(r"\bm\b", "bottleneck", re.sub(r"\bcv(\d)\b", r"conv\1", rest))
    if layer == "9":
        rest = rest.replace("conv2", "conv5", 1)
    for ours, theirs in (("box", "anchor_conv"), ("cls", "class_conv")):
        rest = re.sub(rf"one_to_many\.{ours}\.(\d)", rf"heads.\1.{theirs}", rest)
    return f"{layer}.{rest}"


def file_of(family: str, content: dict[Any, Any]) -> bytes:
    """A file in the family's form with these tensors, whatever they are."""
    file = io.BytesIO()
    torch.save({"model": content} if family == "YOLOX" else content, file)
    return file.getvalue()


@functools.cache
def whole(family: str) -> bytes:
    """A good file."""
    return file_of(family, tensors(family))


_VALUES: tuple[Callable[[Tensor], Any], ...] = (
    *(lambda x: None, lambda x: x.to(torch.int32), lambda x: x > 0, lambda x: x.double(), lambda x: x.half()),
    *(lambda x: x[..., None], lambda x: x[:0] if x.ndim else x, lambda x: x.flatten(), lambda x: torch.zeros(())),
    *(lambda x: torch.full_like(x, float("inf")) if x.is_floating_point() else -x, lambda x: [x], lambda x: "text"),
    lambda x: torch.zeros(1).expand(10**9),
    lambda x: torch.zeros(max(x.shape, default=1) * 4000, *[1] * (x.ndim - 1)) if x.ndim else x,
)


def _confused_tensors(rng: random.Random, family: str) -> bytes:
    """Some tensors are others, are missing, or have another name."""
    content: dict[Any, Any] = dict(tensors(family))
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*content])
        value = content[name]
        match rng.randrange(4):
            case 0:
                del content[name]
            case 1:
                odd = (f"{name}.x", "x\x1b[31m" * 99, 7, None, name.replace("0", "9") if isinstance(name, str) else 8)
                content[rng.choice(odd)] = content.pop(name)
            case _ if isinstance(value, Tensor):
                content[name] = rng.choice(_VALUES)(value)
    return file_of(family, content)


_OF_BYTES = named(flipped, cut, pickle_changed)
