"""`best-int8.onnx`: best.onnx with its convolutions, and what lies between them, in 8 bits (ONNX Runtime, QDQ form).

Weights have a scale for each channel, activations one for each tensor, from the smallest and largest value on the
calibration pictures. Resize, decoding, scores and suppression stay float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tessera.utils.exporting.job import ExportJob
from tessera.utils.exporting.quantized.calibration import calibration_inputs, quantized_weights
from tessera.utils.exporting.quiet import quiet
from tessera.utils.machine.extras import import_extra

BETWEEN = frozenset({"Conv", "Mul", "Sigmoid", "Concat", "Add", "MaxPool", "Resize"})  # that 8 bits pass through
_PRODUCER_KEYS = ("onnx.infer",)  # that the quantiser leaves in the metadata
_WARNINGS, _ERRORS = 2, 3  # severities from which ONNX Runtime prints; the first is its default


def quantize_onnx(content: bytes, job: ExportJob) -> bytes:
    """An ONNX file with its convolutions in 8 bits, checked.

    Args:
        content: the file in float32.
        job: what it was made of.
    """
    onnx = import_extra("onnx", "export", "--int8")
    ir = import_extra("onnx_ir", "export", "--int8")
    quantization = import_extra("onnxruntime.quantization", "export", "--int8")
    model = onnx.load_from_string(content)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "int8.onnx"
        quantization.quantize_static(
            model,
            path,
            _Pictures(job, {value.name for value in model.graph.input}),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            calibrate_method=quantization.CalibrationMethod.MinMax,
            nodes_to_quantize=nodes_between(model.graph, quantized_weights(job)),
        )
        sorted_model = ir.load(path)
        sorted_model.graph.sort()  # the quantiser puts nodes where a branch of an If does not find them
        made = ir.to_proto(sorted_model)
    kept = [entry for entry in made.metadata_props if entry.key not in _PRODUCER_KEYS]
    del made.metadata_props[:]
    made.metadata_props.extend(kept)
    quantized: bytes = made.SerializeToString()
    onnx.checker.check_model(quantized)
    return quantized


class _Pictures:
    """What the quantiser takes its pictures from: a `CalibrationDataReader` by its one method."""

    def __init__(self, job: ExportJob, inputs: Collection[str]) -> None:
        raw, batched = job.config.raw, job.config.batched
        self._name, self._add_axis = ("images" if raw or batched else "image"), batched and not raw
        self._inputs = calibration_inputs(job, whole=not raw)
        limits = {
            "conf": np.array([job.conf], np.float32),
            "iou": np.array([job.config.iou_thres], np.float32),
            "max_det": np.array([job.config.max_det], np.int64),
        }
        self._limits = {name: value for name, value in limits.items() if name in inputs}

    def get_next(self) -> dict[str, Any] | None:
        """The inputs of the next run; None at the end."""
        found = next(self._inputs, None)
        return None if found is None else {self._name: found[None] if self._add_axis else found, **self._limits}


def nodes_between(graph: Any, weights: Collection[str]) -> list[str]:
    """Names of the convolutions with these weights, and of the operators on the way from one to the next.

    What lies before the first of them makes the network's input of a picture; what follows the last decodes.
    """
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    inside = {node.name for node in convolutions if set(node.input) & set(weights)}
    others = {node.name for node in convolutions} - inside
    between = _downstream(graph, inside) & (_upstream(graph, inside) | _upstream(graph, others))
    ends = _downstream(graph, others) | others
    return [node.name for node in graph.node if node.op_type in BETWEEN and node.name in (inside | between) - ends]


def _upstream(graph: Any, start: Collection[str]) -> set[str]:
    """Names of the nodes that lead to some others."""
    links = [(node.name, node.output, node.input) for node in graph.node]
    return _reached(links[::-1], start)


def _downstream(graph: Any, start: Collection[str]) -> set[str]:
    """Names of the nodes that some others lead to."""
    return _reached([(node.name, node.input, node.output) for node in graph.node], start)


def _reached(links: Sequence[tuple[str, Collection[str], Collection[str]]], start: Collection[str]) -> set[str]:
    """Names of the nodes on the way on from some others.

    Args:
        links: name, values that lead to the node, and values that it leads to; each node after those before it.
        start: names of the others.
    """
    values = {value for name, _, onward in links if name in start for value in onward}
    found: set[str] = set()
    for name, led_by, onward in links:
        if any(value in values for value in led_by):
            found.add(name)
            values.update(onward)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the quantiser's advice to prepare a graph that needs none, and the runtime's on optional inputs."""
    onnxruntime = import_extra("onnxruntime", "export", "--int8")
    onnxruntime.set_default_logger_severity(_ERRORS)
    try:
        with quiet(""):
            yield
    finally:
        onnxruntime.set_default_logger_severity(_WARNINGS)
