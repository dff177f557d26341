"""How large an exported file is, and which number types its tensors really have."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.utils.machine.extras import import_extra

_LEAST_SHARE = 0.005  # of all numbers, to be named
_SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I8": "int8"}


def files_of(path: Path) -> tuple[Path, ...]:
    """The file with those that belong to it."""
    beside = {".xml": (".bin",), ".param": (".bin", ".json")}.get(path.suffix, ())
    return path, *(path.with_suffix(suffix) for suffix in beside)


def size_of(path: Path) -> int:
    """Bytes, with those of the files that belong to it."""
    return sum(one.stat().st_size for one in files_of(path))


def precision_of(path: Path) -> str:
    """Types of the numbers in the artefact itself, such as "int8 98 %, float32 2 %"; "" where they are not read."""
    reader = {
        ".onnx": _onnx,
        ".xml": _openvino,
        ".torchscript": _torchscript,
        ".pt2": _pt2,
        ".pt": _checkpoint,
        ".safetensors": _safetensors,
    }.get(path.suffix)
    if reader is None:
        return ""
    counts = reader(path)
    total = sum(counts.values())
    named = [(count / total, name) for name, count in counts.items() if count >= _LEAST_SHARE * total]
    return ", ".join(
        f"{name} {share:.0%}" if share < 1 - _LEAST_SHARE else name for share, name in sorted(named, reverse=True)
    )


def _onnx(path: Path) -> Counter[str]:
    onnx = import_extra("onnx", "export", str(path))
    counts: Counter[str] = Counter()
    for tensor in onnx.load(path).graph.initializer:
        name = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
        counts[name] += math.prod(tensor.dims)
    return counts


def _openvino(path: Path) -> Counter[str]:
    openvino = import_extra("openvino", "openvino", str(path))
    counts: Counter[str] = Counter()
    for node in openvino.Core().read_model(path).get_ops():
        if node.get_type_name() == "Constant":
            value = node.output(0)
            counts[np.dtype(value.get_element_type().to_dtype()).name] += math.prod(value.get_shape())
    return counts


def _torchscript(path: Path) -> Counter[str]:
    return _tensors(torch.jit.load(path, "cpu").state_dict())


def _pt2(path: Path) -> Counter[str]:
    return _tensors(torch.export.load(path).state_dict)


def _checkpoint(path: Path) -> Counter[str]:
    return _tensors(torch.load(path, "cpu", weights_only=True)["ema"])


def _tensors(found: dict[str, Any]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for tensor in found.values():
        if isinstance(tensor, Tensor):
            counts[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return counts


def _safetensors(path: Path) -> Counter[str]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    counts: Counter[str] = Counter()
    for name, entry in header.items():
        if name != "__metadata__":
            counts[_SAFETENSORS.get(entry["dtype"], entry["dtype"])] += math.prod(entry["shape"])
    return counts
