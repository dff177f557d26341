"""Weight files of YOLOX and YOLOv9 in their published form, made by the reference data's rule, and their predictions.

The reference data gives every tensor's name and shape, the rule that fills it from its name, an image by its seed, and
the rows that the families' own code predicts for it: no weight file is needed. Of YOLOX-Nano, the published weights.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RELATIVE = 1e-4  # of a column's largest value
SIZE_HW = (160, 224)
FILES = {  # as published, by the name of the reference
    "yolox_tiny": "yolox_tiny.pth",
    "yolox_s": "yolox_s.pth",
    "yolov9-t": "v9-t.pt",
    "yolov9-c": "v9-c.pt",
}
NANO = "yolox_nano"


def shapes(shared: Path, reference: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of the state_dict of one of `FILES`, by name."""
    listed = json.loads((shared / "reference" / "permissive" / f"{reference}.json").read_text())["tensors"]
    return {name: tuple(shape) for name, shape in listed.items()}


def rows(shared: Path, reference: str) -> NDArray[np.float32]:
    """Float32 (735, 85 or 84): what the family's own code predicts for `image` with `state_dict`'s weights."""
    with np.load(shared / "reference" / "permissive" / f"{reference}.npz") as stored:
        return np.asarray(stored["rows"])


def image() -> Tensor:
    """Return the image of the rows, uint8 (160, 224, 3), RGB."""
    return torch.randint(0, 256, (*SIZE_HW, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def state_dict(named: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: _filled(name, shape) for name, shape in named.items()}


def _filled(name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith("num_batches_tracked"):
        return torch.ones(shape, dtype=torch.int64)
    if "anc2vec" in name:
        return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if name.endswith("running_var"):
        return 1 + 0.1 * drawn.abs()
    if len(shape) == 1:
        return 1 + 0.1 * drawn if name.endswith("weight") else 0.1 * drawn
    return drawn / math.sqrt(math.prod(shape[1:]))


def write(shared: Path, reference: str, folder: Path) -> Path:
    """The file of one of `FILES` or of NANO in `folder`, in its published form, by its published name."""
    if reference == NANO:
        return Path(shutil.copy(shared / "weights" / f"{NANO}.pth", folder))
    tensors = state_dict(shapes(shared, reference))
    content: Any = {"start_epoch": 300, "model": tensors} if reference.startswith("yolox") else tensors
    torch.save(content, path := folder / FILES[reference])
    return path
