"""Hostile YOLOX and YOLOv9 weights: truncated, flipped, or with other tensors."""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tests.conftest import SHARED
from tests.deploy.foreign.made import small_yolox, v9_t
from tests.hostile.damages import cut, flipped, named, pickle_changed
from tests.hostile.expect import Message, message_or_result

CASES, FAST_CASES = 1500, 12


def prepare() -> None:
    for family in ("YOLOX", "YOLOv9") if SHARED.is_dir() else ():
        whole(family)


def trial(rng: random.Random, folder: Path) -> str:
    if not SHARED.is_dir():
        return "no reference data here"
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
    return small_yolox(SHARED) if family == "YOLOX" else v9_t(SHARED)


def file_of(family: str, content: dict[Any, Any]) -> bytes:
    file = io.BytesIO()
    torch.save({"model": content} if family == "YOLOX" else content, file)
    return file.getvalue()


@functools.cache
def whole(family: str) -> bytes:
    return file_of(family, tensors(family))


_VALUES: tuple[Callable[[Tensor], Any], ...] = (
    *(lambda x: None, lambda x: x.to(torch.int32), lambda x: x > 0, lambda x: x.double(), lambda x: x.half()),
    *(lambda x: x[..., None], lambda x: x[:0] if x.ndim else x, lambda x: x.flatten(), lambda x: torch.zeros(())),
    *(lambda x: torch.full_like(x, float("inf")) if x.is_floating_point() else -x, lambda x: [x], lambda x: "text"),
    lambda x: torch.zeros(1).expand(10**9),
    lambda x: torch.zeros(max(x.shape, default=1) * 4000, *[1] * (x.ndim - 1)) if x.ndim else x,
)


def _confused_tensors(rng: random.Random, family: str) -> bytes:
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
