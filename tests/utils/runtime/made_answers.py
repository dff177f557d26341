"""ONNX files that answer every picture with the same, whatever that is; and one that never answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.utils.machine.optional_packages import import_extra
from tessera.utils.runtime.exported import WHOLE
from tests.utils.runtime.made_files import STRINGS

WHOLE_STRINGS = {**STRINGS, "format": WHOLE}
ANSWER = {  # a sound one
    "boxes": np.array([[1, 2, 30, 40], [5, 5, 20, 60.5]], np.float32),
    "scores": np.array([0.75, 0.5], np.float32),
    "classes": np.array([2, 0], np.int64),
}
ROWS = np.array([[[32, 32, 20, 20, 0.5, 0.25, 0], [30, 30, 9, 9, 0, 0, 0.75]]], np.float32)


def write_answer(path: Path, answer: Mapping[str, NDArray[Any]], strings: Mapping[str, str] = WHOLE_STRINGS) -> Path:
    """A whole detector that finds `answer`, its outputs by name."""
    inputs = "uint8[height, width, 3] image, float conf, float iou, int64 max_det"
    return _write(path, inputs, answer, strings)


def write_rows(path: Path, rows: NDArray[Any], strings: Mapping[str, str] = STRINGS, batch: Any = "batch") -> Path:
    """A bare network that computes `rows` of any images."""
    return _write(path, f"float[{batch}, 3, height, width] images", {"predictions": rows}, strings)


def _write(path: Path, inputs: str, outputs: Mapping[str, NDArray[Any]], strings: Mapping[str, str]) -> Path:
    """Write a file whose outputs are constants."""
    onnx = import_extra("onnx", "export", "a test")
    kept = [onnx.numpy_helper.from_array(np.asarray(value), f"kept_{name}") for name, value in outputs.items()]
    value_of = onnx.helper.make_tensor_value_info
    infos = [value_of(name, one.data_type, None) for name, one in zip(outputs, kept, strict=True)]
    body = " ".join(f"{name} = Identity (kept_{name})" for name in outputs)
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> answers ({inputs}) => () {{ {body} }}')
    model.graph.output.extend(infos)
    model.graph.initializer.extend(kept)
    onnx.helper.set_model_props(model, dict(strings))
    onnx.save(model, path)
    return path
