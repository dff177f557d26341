"""`best-int8.onnx`: best.onnx with its convolutions, and what lies between them, in 8 bits (ONNX Runtime, QDQ form).

Weights have a scale for each channel, activations one for each tensor, from the smallest and largest value on the
calibration pictures. Resize, decoding, scores and suppression stay float32.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from tessera.utils.exporting.onnx_file import Onnx, onnx_bytes
from tessera.utils.exporting.quantized.calibration import calibration_index, calibration_inputs, quantized_weights
from tessera.utils.exporting.subject import Subject
from tessera.utils.machine.extras import import_extra
from tessera.utils.types import DatasetIndex

BETWEEN = frozenset({"Conv", "Mul", "Sigmoid", "Concat", "Add", "MaxPool", "Resize"})  # that 8 bits pass through
_PRODUCER_KEYS = ("onnx.infer",)  # that the quantiser leaves in the metadata
_WARNINGS, _ERRORS = 2, 3  # severities from which ONNX Runtime prints; the first is its default


class QuantizedOnnx(Onnx):
    """ONNX, in 8 bits too."""

    variants = Onnx.variants | {"int8"}

    def require(self, subject: Subject) -> None:
        """As Format: the quantiser is part of ONNX Runtime."""
        super().require(subject)
        if subject.config.int8:
            import_extra("onnxruntime", "export", "--int8")

    def content(self, subject: Subject) -> bytes:
        """As Onnx."""
        return int8_bytes(subject) if subject.config.int8 else super().content(subject)


def int8_bytes(subject: Subject) -> bytes:
    """The quantised file's content, checked.

    Raises:
        UserError: a package or the pictures are missing.
    """
    onnx = import_extra("onnx", "export", "--int8")
    ir = import_extra("onnx_ir", "export", "--int8")
    quantization = import_extra("onnxruntime.quantization", "export", "--int8")
    index = calibration_index(subject)
    model = onnx.load_from_string(onnx_bytes(subject))
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "int8.onnx"
        quantization.quantize_static(
            model,
            path,
            _Pictures(subject, index, {value.name for value in model.graph.input}),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            calibrate_method=quantization.CalibrationMethod.MinMax,
            nodes_to_quantize=nodes_between(model.graph, quantized_weights(subject)),
        )
        sorted_model = ir.load(path)
        sorted_model.graph.sort()  # the quantiser puts nodes where a branch of an If does not find them
        made = ir.to_proto(sorted_model)
    kept = [entry for entry in made.metadata_props if entry.key not in _PRODUCER_KEYS]
    del made.metadata_props[:]
    made.metadata_props.extend(kept)
    content: bytes = made.SerializeToString()
    onnx.checker.check_model(content)
    return content


class _Pictures:
    """What the quantiser takes its pictures from: a `CalibrationDataReader` by its one method."""

    def __init__(self, subject: Subject, index: DatasetIndex, inputs: Collection[str]) -> None:
        raw, batched = subject.config.raw, subject.config.batched
        self._name, self._add_axis = ("images" if raw or batched else "image"), batched and not raw
        self._inputs = calibration_inputs(subject, index, whole=not raw)
        conf, iou, max_det = astuple(subject.defaults)
        limits = {"conf": np.float32(conf), "iou": np.float32(iou), "max_det": np.int64(max_det)}
        self._limits = {name: value.reshape(1) for name, value in limits.items() if name in inputs}

    def get_next(self) -> dict[str, Any] | None:
        """The inputs of the next run; None at the end."""
        found = next(self._inputs, None)
        return None if found is None else {self._name: found[None] if self._add_axis else found, **self._limits}


def nodes_between(graph: Any, weights: Collection[str]) -> list[str]:
    """Names of the convolutions with these weights, and of the operators on the way from one to the next.

    What lies before the first of them makes the network's input of a picture; what follows the last decodes.
    """
    made_by = {output: node for node in graph.node for output in node.output}
    inside = {node.name for node in graph.node if node.op_type == "Conv" and set(node.input) & set(weights)}
    before, after = _ancestors(graph, made_by, inside), _descendants(graph, inside)
    others = [node for node in graph.node if node.op_type == "Conv" and node.name not in inside]
    ends = _descendants(graph, {node.name for node in others}) | {node.name for node in others}
    leads_on = before | _ancestors(graph, made_by, {node.name for node in others})
    return [
        node.name
        for node in graph.node
        if node.op_type in BETWEEN
        and node.name not in ends
        and (node.name in inside or (node.name in after and node.name in leads_on))
    ]


def _ancestors(graph: Any, made_by: dict[str, Any], start: Collection[str]) -> set[str]:
    """Names of the nodes that lead to some others."""
    waiting = [node for node in graph.node if node.name in start]
    found: set[str] = set()
    while waiting:
        for value in waiting.pop().input:
            node = made_by.get(value)
            if node is not None and node.name not in found:
                found.add(node.name)
                waiting.append(node)
    return found


def _descendants(graph: Any, start: Collection[str]) -> set[str]:
    """Names of the nodes that some others lead to."""
    values = {output for node in graph.node if node.name in start for output in node.output}
    found: set[str] = set()
    for node in graph.node:  # in an order in which each follows what it takes
        if node.name not in found and any(value in values for value in node.input):
            found.add(node.name)
            values.update(node.output)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the quantiser's advice to prepare a graph that needs none, and the runtime's on optional inputs."""
    onnxruntime = import_extra("onnxruntime", "export", "--int8")
    logger = logging.getLogger()
    before = logger.level
    logger.setLevel(logging.ERROR)
    onnxruntime.set_default_logger_severity(_ERRORS)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(_WARNINGS)
        logger.setLevel(before)
