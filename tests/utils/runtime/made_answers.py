"""ONNX files that answer every picture with the same, whatever that is; and one that never answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.utils.machine.extras import import_extra
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
    onnx = import_extra("onnx", "export", "a test")
    inputs = [
        onnx.helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (
            ("image", onnx.TensorProto.UINT8, ["height", "width", 3]),
            ("conf", onnx.TensorProto.FLOAT, []),
            ("iou", onnx.TensorProto.FLOAT, []),
            ("max_det", onnx.TensorProto.INT64, []),
        )
    ]
    return _write(path, inputs, answer, strings)


def write_rows(path: Path, rows: NDArray[Any], strings: Mapping[str, str] = STRINGS, batch: Any = "batch") -> Path:
    """A bare network that computes `rows` of any images."""
    onnx = import_extra("onnx", "export", "a test")
    images = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, [batch, 3, "height", "width"])
    return _write(path, [images], {"predictions": rows}, strings)


def write_endless(path: Path) -> Path:
    """A bare network with a loop whose condition stays true."""
    onnx = import_extra("onnx", "export", "a test")
    helper, floats, flag = onnx.helper, onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL
    body = helper.make_graph(
        [helper.make_node("Identity", ["still"], ["on"]), helper.make_node("Identity", ["before"], ["after"])],
        "for ever",
        [
            helper.make_tensor_value_info("number", onnx.TensorProto.INT64, []),
            helper.make_tensor_value_info("still", flag, []),
            helper.make_tensor_value_info("before", floats, None),
        ],
        [helper.make_tensor_value_info("on", flag, []), helper.make_tensor_value_info("after", floats, None)],
    )
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["images"], ["mean"], keepdims=0),
            helper.make_node("Loop", ["", "always", "mean"], ["looped"], body=body),
            helper.make_node("Add", ["rows", "looped"], ["predictions"]),
        ],
        "endless",
        [helper.make_tensor_value_info("images", floats, ["batch", 3, "height", "width"])],
        [helper.make_tensor_value_info("predictions", floats, None)],
        [
            onnx.numpy_helper.from_array(np.array(True), "always"),
            onnx.numpy_helper.from_array(ROWS, "rows"),
        ],
    )
    return _save(path, graph, STRINGS)


def _write(path: Path, inputs: list[Any], outputs: Mapping[str, NDArray[Any]], strings: Mapping[str, str]) -> Path:
    onnx = import_extra("onnx", "export", "a test")
    kept = [onnx.numpy_helper.from_array(np.asarray(value), f"kept_{name}") for name, value in outputs.items()]
    infos = [
        onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
        for name, tensor in zip(outputs, kept, strict=True)
    ]
    nodes = [onnx.helper.make_node("Identity", [tensor.name], [tensor.name.removeprefix("kept_")]) for tensor in kept]
    return _save(path, onnx.helper.make_graph(nodes, "answers", inputs, infos, kept), strings)


def _save(path: Path, graph: Any, strings: Mapping[str, str]) -> Path:
    onnx = import_extra("onnx", "export", "a test")
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    onnx.helper.set_model_props(model, dict(strings))
    onnx.save(model, path)
    return path
