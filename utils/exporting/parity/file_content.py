"""How large an exported file is, and which number types its tensors really have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tessera.utils.machine.optional_packages import import_extra

_LEAST_SHARE = 0.005  # of all numbers, to be named


def files_of(path: Path) -> tuple[Path, ...]:
    """The file with those that belong to it."""
    beside = {".xml": (".bin",), ".param": (".bin", ".json")}.get(path.suffix, ())
    return path, *(path.with_suffix(suffix) for suffix in beside)


def size_of(path: Path) -> int:
    """Bytes, with those of the files that belong to it."""
    return sum(one.stat().st_size for one in files_of(path))


def precision_of(path: Path) -> str:
    """Types of the numbers in the artefact itself, such as "int8 98 %, float32 2 %"; "" where they are not read."""
    counts: Counter[str] = Counter()
    for name, numbers in _tensors(path):
        counts[name] += numbers
    shares = {name: count / counts.total() for name, count in counts.most_common()}
    named = {name: share for name, share in shares.items() if share >= _LEAST_SHARE}
    return ", ".join(f"{name} {share:.0%}" if share < 1 - _LEAST_SHARE else name for name, share in named.items())


def _tensors(path: Path) -> Iterable[tuple[str, int]]:
    """Type and size of each tensor in a file."""
    if path.suffix == ".onnx":
        onnx = import_extra("onnx", "export", str(path))
        type_of = onnx.helper.tensor_dtype_to_np_dtype
        return [(str(type_of(one.data_type)), math.prod(one.dims)) for one in onnx.load(path).graph.initializer]
    if path.suffix == ".xml":
        openvino = import_extra("openvino", "openvino", str(path))
        nodes = openvino.Core().read_model(path).get_ops()
        values = [node.output(0) for node in nodes if node.get_type_name() == "Constant"]
        return [(np.dtype(one.get_element_type().to_dtype()).name, math.prod(one.get_shape())) for one in values]
    if path.suffix == ".safetensors":
        found = import_extra("safetensors.torch", "safetensors", str(path)).load_file(path)
    elif path.suffix == ".torchscript":
        found = torch.jit.load(path, "cpu").state_dict()
    elif path.suffix == ".pt2":
        found = torch.export.load(path).state_dict
    elif path.suffix == ".pt":
        found = torch.load(path, "cpu", weights_only=True)["ema"]
    else:
        found = {}
    tensors = [one for one in found.values() if isinstance(one, Tensor)]
    return [(str(one.dtype).removeprefix("torch."), one.numel()) for one in tensors]
