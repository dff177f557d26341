"""Size and tensor types of an exported file."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tessera.utils.machine.optional_packages import import_extra

_MIN_FRACTION = 0.005  # of all numbers, to be listed


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the file and its companions."""
    beside = {".xml": (".bin",), ".param": (".bin", ".json")}.get(path.suffix, ())
    return path, *(path.with_suffix(suffix) for suffix in beside)


def size_of(path: Path) -> int:
    """Return the size in bytes, companions included."""
    return sum(one.stat().st_size for one in files_of(path))


def precision_of(path: Path) -> str:
    """Return the types of the stored numbers, such as "int8 98%, float32 2%"; "" = unknown."""
    counts: Counter[str] = Counter()
    for name, numbers in _tensors(path):
        counts[name] += numbers
    fractions = {name: count / counts.total() for name, count in counts.most_common()}
    listed = {name: fraction for name, fraction in fractions.items() if fraction >= _MIN_FRACTION}
    return ", ".join(
        f"{name} {fraction:.0%}" if fraction < 1 - _MIN_FRACTION else name for name, fraction in listed.items()
    )


def _tensors(path: Path) -> Iterable[tuple[str, int]]:
    """Return type and size of each tensor."""
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
        with warnings.catch_warnings(action="ignore"):  # that TorchScript is deprecated
            found = torch.jit.load(path, "cpu").state_dict()
    elif path.suffix == ".pt2":
        found = torch.export.load(path).state_dict
    elif path.suffix == ".pt":
        found = torch.load(path, "cpu", weights_only=True)["ema"]
    else:
        found = {}
    tensors = [one for one in found.values() if isinstance(one, Tensor)]
    return [(str(one.dtype).removeprefix("torch."), one.numel()) for one in tensors]
