"""Tests of ONNX files: which operators and types TensorRT's parser supports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from tessera.deploy.exporting.network import RawNetwork, network_graph
from tessera.models.detector import DetectionModel
from tests.utils.engine.trainer import FREE, YOLOV9, YOLOX

# docs/operators.md of onnx-tensorrt, which says the same of these in 10.6 and 10.15: types of the first input. UINT8 is
# for inputs and outputs of a file alone. TensorRT 10.0 reads opsets 9 to 20.
TABLE = (
    ("FLOAT FLOAT16", "AveragePool Clip Conv Exp MaxPool NonZero Pow Resize Sigmoid Softmax"),
    ("FLOAT FLOAT16 INT32 INT64", "Add Div Max Min Mul Pad Range ReduceMax ReduceSum Sub TopK"),
    ("FLOAT FLOAT16 INT32 INT64 BOOL", "Cast Concat Expand Gather Reshape Shape Slice Split"),
    ("FLOAT FLOAT16 INT32 INT64 BOOL", "Squeeze Transpose Unsqueeze Where"),
)
SUPPORTED = {kind: types.split() for types, kinds in TABLE for kind in kinds.split()}
CONSTANT_AXES = {"ReduceMax", "ReduceSum", "Squeeze", "Unsqueeze"}
RESIZE = {"asymmetric", "nearest", "floor", "stretch"}
LITE = [[-1, 1, "ConvReLU6", [8, 3, 2]], [-1, 1, "InvertedResidual", [8, 3, 2, 6]], [-1, 1, "SPPF", [16, 5]]]
NECK = [[-1, 1, "nn.Upsample", [None, 2, "nearest"]], [[-1, 0], 1, "Concat", [1]], [-1, 1, "Elan", [16]]]
DEPTHWISE = [[-1, 1, "Focus", [8, 3]], [-1, 1, "DepthwiseSeparableConv", [8, 3, 2]], [-1, 1, "SPP", [16, [5, 9]]]]
FREE_HEAD = {**FREE, "backbone": LITE + NECK, "head": [[[5], 1, "DetectFree", ["nc", 8, 1, True]]]}
FAMILIES = FREE_HEAD, {**YOLOX, "backbone": DEPTHWISE}, YOLOV9  # that with anchors is in the whole detector


def unsupported(model: Any) -> dict[str, tuple[str, str]]:
    """Return the operator and the type of the nodes that the parser refuses, by name; branches are not looked at."""
    refused = {}
    for node in ir.from_proto(onnx.shape_inference.infer_shapes(model)).graph:
        kind = node.op_type, node.inputs[0].dtype.name  # type: ignore[union-attr]
        modes = {mode.value for mode in node.attributes.values() if mode.type == ir.AttributeType.STRING}
        computed = kind[0] in CONSTANT_AXES and any(axes and not axes.const_value for axes in node.inputs[1:])
        if kind[1] not in SUPPORTED.get(kind[0], ()) or computed or (kind[0] == "Resize" and not modes <= RESIZE):
            refused[str(node.name)] = kind
    return refused


@pytest.mark.parametrize("size_hw", [(64, 64), pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_raw_networks_are_for_tensorrt(family: dict[str, Any], size_hw: tuple[int, int] | None) -> None:
    """In float16; float32 has the same operators, without casts."""
    model = DetectionModel(family)
    model.head.strip_for_inference(end2end=family is FREE_HEAD and size_hw is None)
    made = network_graph(RawNetwork(model, half=True), size_hw, output="predictions", opset=18)
    assert unsupported(ir.to_proto(made)) == {}


def test_of_the_whole_detector_the_network_alone_is(made_onnx: Path) -> None:
    refused = unsupported(onnx.load(made_onnx))
    assert {("Pad", "UINT8"), ("NonZero", "BOOL")} <= set(refused.values()), "docs/deploy.md says why --raw"
    assert all(name.startswith(("before", "after")) for name in refused)
