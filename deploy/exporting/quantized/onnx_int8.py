"""8-bit ONNX files: quantised convolutions and the operators between them (ONNX Runtime, QDQ form).

Weights have a scale per channel, activations one per tensor, from their range on the calibration images. SiLU, resize,
decoding, scores, NMS and the layers of sensitivity.py stay float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tessera.deploy.exporting.job import ExportJob
from tessera.deploy.exporting.raw_network import quiet
from tessera.utils.machine.optional_packages import import_extra

# Operators that are quantised.
QUANTIZED_OPERATORS = frozenset({"Conv", "Clip", "Mul", "Sigmoid", "Concat", "Add", "MaxPool", "Resize"})
_CONTRIBUTED, _SILU = "com.microsoft", "QuickGelu"  # domain of ONNX Runtime's own operators, and one of them
SILU_LOW = -8.0  # SiLU is −0.003 there; lower values would only coarsen the quantisation steps
_WARNINGS, _ERRORS = 2, 3  # log severities of ONNX Runtime; the first is its default


def quantize_onnx(content: bytes, job: ExportJob) -> bytes:
    """Return a float32 ONNX file with quantised convolutions, checked."""
    onnx = import_extra("onnx", "export", "--int8")
    ir = import_extra("onnx_ir", "export", "--int8")
    quantization = import_extra("onnxruntime.quantization", "export", "--int8")
    model = onnx.load_from_string(content)
    weights = job.quantized_weights
    feeds = _feeds(job, {value.name for value in model.graph.input})
    fuse_silu(model, weights)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "int8.onnx"
        quantization.quantize_static(
            model,
            path,
            SimpleNamespace(get_next=lambda: next(feeds, None)),  # a CalibrationDataReader by its one method
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            calibrate_method=quantization.CalibrationMethod.MinMax,
            nodes_to_quantize=quantized_nodes(model.graph, weights),
        )
        sorted_model = ir.load(path)
        sorted_model.graph.sort()  # the quantiser appends nodes that branches of an If read
        sorted_model.metadata_props.pop("onnx.infer", None)  # added by the quantiser
        made = ir.to_proto(sorted_model)
    quantized: bytes = made.SerializeToString()
    onnx.checker.check_model(quantized)
    return quantized


def _feeds(job: ExportJob, taken: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the inputs of each calibration run."""
    if job.config.raw:
        yield from ({"images": image.numpy()} for image in job.calibration_images())
        return
    limits = {
        "conf": np.array([job.conf], np.float32),
        "iou": np.array([job.config.iou_thres], np.float32),
        "max_det": np.array([job.config.max_det], np.int64),
    }
    limits = {name: value for name, value in limits.items() if name in taken}
    for image in job.raw_calibration_images():
        yield {**limits, **({"images": image[None]} if job.config.batched else {"image": image})}


def fuse_silu(model: Any, weights: Collection[str]) -> None:
    """Fuse SiLU after the convolutions with these weights into one operator, in place.

    The operator is ONNX Runtime's own, and OpenVINO knows it. Separate `Sigmoid` and `Mul` would be quantised, or take
    twice the time in float. The clip at `SILU_LOW` limits the range of the convolution; the quantiser removes it.
    """
    onnx = import_extra("onnx", "export", "--int8")
    graph = model.graph
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    given = {node.output[0] for node in graph.node if node.op_type == "Conv" and set(node.input) & set(weights)}
    low = onnx.numpy_helper.from_array(np.float32(SILU_LOW), "silu_low")
    for node in graph.node:
        after = readers.get(node.output[0], []) if node.op_type == "Sigmoid" and node.input[0] in given else []
        if len(after) == 1 and after[0].op_type == "Mul" and set(after[0].input) == {node.input[0], node.output[0]}:
            (cut,), (silu,) = node.output, after[0].output
            node.CopyFrom(onnx.helper.make_node("Clip", [node.input[0], low.name], [cut], node.name))
            joined = onnx.helper.make_node(_SILU, [cut], [silu], after[0].name, domain=_CONTRIBUTED, alpha=1.0)
            after[0].CopyFrom(joined)
    graph.initializer.append(low)
    model.opset_import.append(onnx.helper.make_opsetid(_CONTRIBUTED, 1))


def quantized_nodes(graph: Any, weights: Collection[str]) -> list[str]:
    """Return the names of the convolutions with these weights and of the operators between them."""
    names: list[str] = []
    values: set[str] = set()
    for node in graph.node:
        read = weights if node.op_type == "Conv" else values if node.op_type in (*QUANTIZED_OPERATORS, _SILU) else ()
        if any(name in read for name in node.input):
            values.update(node.output)
            if node.op_type in QUANTIZED_OPERATORS:
                names.append(node.name)
    return names


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence advice of the quantiser and the runtime that does not apply."""
    onnxruntime = import_extra("onnxruntime", "export", "--int8")
    onnxruntime.set_default_logger_severity(_ERRORS)
    try:
        with quiet(""):
            yield
    finally:
        onnxruntime.set_default_logger_severity(_WARNINGS)
