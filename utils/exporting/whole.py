"""The whole detector as one ONNX graph: pictures in, detections out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from utils.exporting.graph import Nodes, Value, described
from utils.exporting.network import OPSET, Network, export_network
from utils.exporting.postprocessing import Thresholds, detect, in_pictures, of_each, of_one
from utils.exporting.preprocessing import preprocess
from utils.exporting.subject import Defaults


def export_whole(
    network: Network, imgsz: int, defaults: Defaults, *, batched: bool = False, opset: int = OPSET
) -> Value:
    """A model of onnx_ir: `image` uint8 (H, W, 3) RGB to `boxes`, `scores`, `classes` in that picture's pixels.

    Args:
        network: not joined.
        imgsz: long side in pixels that pictures are brought to.
        defaults: of the inputs conf, iou and max_det, which need not be fed.
        batched: `images` (B, H, W, 3) instead, pictures of one size; then outputs are (B, n, …), and `counts` (B,) says
            how many of a picture's n are found.
        opset: of the standard operators.
    """
    import onnx_ir as ir

    model = export_network(network, output="decoded", opset=opset)
    graph = model.graph
    (images,), (decoded,) = graph.inputs, graph.outputs
    limits = Thresholds(
        _optional("conf", np.float32(defaults.conf)),
        _optional("iou", np.float32(defaults.iou)),
        _optional("max_det", np.int64(defaults.max_det)),
    )

    before = Nodes("before")
    if batched:
        given = described("images", np.uint8, ["batch", "height", "width", 3])
        images.name = "letterboxed"
    else:
        given = described("image", np.uint8, ["height", "width", 3])
    pictures = given if batched else before.Unsqueeze(given, [0])
    placed = preprocess(before, pictures, imgsz, network.model.stride)
    ir.convenience.replace_all_uses_with(images, placed.images)

    after = Nodes("after")
    head = network.model.head
    found = detect(after, decoded, limits, has_objectness=head.has_objectness, suppress=head.needs_suppression)
    found = found._replace(boxes=in_pictures(after, found.boxes, placed))
    if batched:
        count = after.Slice(after.Shape(given), [0], [1])
        boxes, scores, classes, counts = of_each(after, found, limits.max_det, count)
        n: list[int | str] = ["batch", "n"]
        outputs = [boxes, scores, classes, _named(counts, "counts", np.int64, ["batch"])]
    else:
        boxes, scores, classes, _ = of_one(after, found, limits.max_det)
        n = ["n"]
        outputs = [boxes, scores, classes]
    _named(boxes, "boxes", np.float32, [*n, 4])
    _named(scores, "scores", np.float32, n)
    _named(classes, "classes", np.int64, n)

    graph.insert_before(graph[0], before.nodes)
    graph.extend(after.nodes)
    graph.inputs[:] = [given, *limits]
    graph.outputs[:] = outputs
    for value in (*before.initializers, *after.initializers, *limits):
        graph.register_initializer(value)
    graph.name = "detector"
    return model


def _optional(name: str, default: np.generic) -> Value:
    """An input that has a default: a graph's input that is an initializer too."""
    import onnx_ir as ir

    value = described(name, type(default), [1])
    value.const_value = ir.tensor(np.array([default]), name=name)
    return value


def _named(value: Value, name: str, dtype: type[np.generic], shape: Sequence[int | str]) -> Value:
    """The value as an output of the graph."""
    import onnx_ir as ir

    value.name = name
    value.dtype, value.shape = ir.DataType.from_numpy(np.dtype(dtype)), ir.Shape(list(shape))
    return value
