"""Small tensor tables as in files of YOLOX and YOLOv9, made by the rule of the reference data."""

from __future__ import annotations

import re
import resource
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.errors import UserError
from tests import families
from tests.hostile.expect import checked

Tensors = dict[str, Tensor]

NC = 80
MEMORY = 3 << 30  # bytes of address space beside what is there before; the files have some megabytes
STEM = "backbone.backbone.stem.conv.conv.weight"
MIDDLE = "backbone.backbone.dark4.1.m.0.conv1.conv.weight"
LAST = "head.cls_preds.0.weight"
V9_HEAD = 22  # its layer; the auxiliary branch lies behind it


@pytest.fixture
def bounded() -> Iterator[None]:
    """No more memory than this; where it cannot be known what the process has, as much as there is."""
    statm = Path("/proc/self/statm")
    before = resource.getrlimit(resource.RLIMIT_AS)
    if statm.is_file():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def small_yolox(shared: Path, nc: int = NC, depth: int = 1) -> Tensors:
    """A YOLOX of a quarter of the s size's width and `depth` times its depth: half a million parameters at 1."""
    named = {}
    for name, shape in families.shapes(shared, "yolox_s").items():
        found = re.fullmatch(r"(.+\.m\.)(\d+)(\..+)", name)
        each = [f"{found[1]}{int(found[2]) * depth + k}{found[3]}" for k in range(depth)] if found else [name]
        named.update(dict.fromkeys(each, tuple(_quarter(side, nc) for side in shape)))
    return families.state_dict(named)


def _quarter(side: int, nc: int) -> int:
    """A side of a tensor: channels are multiples of 32 there, but for those of the classes."""
    return nc if side == NC else side // 4 if side >= 32 else side


def v9_t(shared: Path, nc: int = NC, width: int = 128, *, auxiliary: bool = False) -> Tensors:
    """YOLOv9-t for `nc` classes, its class branches `width` channels wide."""
    named = {
        name: shape
        for name, shape in families.shapes(shared, "yolov9-t").items()
        if auxiliary or int(name.partition(".")[0]) <= V9_HEAD
    }
    return families.state_dict(
        {name: _classes(name, shape, nc, width) if ".class_conv." in name else shape for name, shape in named.items()}
    )


def _classes(name: str, shape: tuple[int, ...], nc: int, width: int) -> tuple[int, ...]:
    """The shape of a tensor of the class branches."""
    if ".class_conv.2." in name:
        return (nc, width, 1, 1) if len(shape) == 4 else (nc,)
    if ".class_conv.1.conv." in name:
        return (width, width, 3, 3)
    return (width, *shape[1:]) if shape else ()


def save(path: Path, content: Any) -> Path:
    """Write it as the family's own code would."""
    torch.save(content, path)
    return path


def with_at(x: Tensor, value: float) -> Tensor:
    """A copy whose last number is another."""
    x = x.clone()
    x.view(-1)[-1] = value
    return x


def refusal(path: Path) -> str:
    """What a user reads of a file that val.py cannot take."""
    with pytest.raises(UserError) as caught:
        model_of_weights(load_weights(path), str(path))
    text = checked(str(caught.value))
    assert str(path) in text, text
    return text


def archive(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None) -> Path:
    """A checkpoint file with this pickle, laid out as torch.save does."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        for key, content in (storages or {}).items():
            file.writestr(f"archive/data/{key}", content)
        file.writestr("archive/version", "3\n")
    return path


class Marking:
    """Unpickles to a call of `function` with `args`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call
