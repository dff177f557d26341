"""The whole detector as one ONNX graph: pictures in, detections out."""

from __future__ import annotations

import numpy as np

from tessera.utils.exporting.bare_network import BareNetwork, network_graph
from tessera.utils.exporting.graph import Nodes, Value, described
from tessera.utils.exporting.postprocessing import Limits, detect, in_pictures, of_each, of_one
from tessera.utils.exporting.preprocessing import preprocess


def whole_graph(network: BareNetwork, imgsz: int, *, batched: bool, opset: int) -> Value:
    """A model of onnx_ir: `image` uint8 (H, W, 3) RGB to `boxes`, `scores`, `classes` in that picture's pixels.

    The thresholds `conf`, `iou` and `max_det` are inputs without a default. ONNX knows one, an initializer of an
    input's name, but only ONNX Runtime in Python, C and C++ lets it be replaced; JavaScript's, OpenVINO, OpenCV and
    TensorRT use the default whatever is given. `iou` is left out where nothing is suppressed: runtimes drop inputs
    that nothing reads.

    Args:
        network: not joined.
        imgsz: long side in pixels that pictures are brought to.
        batched: `images` (B, H, W, 3) instead, pictures of one size; then outputs are (B, n, …), and `counts` (B,) says
            how many of a picture's n are found.
        opset: of the standard operators.
    """
    import onnx_ir as ir

    model = network_graph(network, None, output="decoded", opset=opset)
    graph = model.graph
    (images,), (decoded,) = graph.inputs, graph.outputs
    head = network.model.head
    limits = Limits(
        described("conf", np.float32, [1]),
        described("iou", np.float32, [1]) if head.needs_suppression else None,
        described("max_det", np.int64, [1]),
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
    found = detect(after, decoded, limits, has_objectness=head.has_objectness)
    found = found._replace(boxes=in_pictures(after, found.boxes, placed))
    n: list[int | str] = ["batch", "n"] if batched else ["n"]
    if batched:
        count = after.Slice(after.Shape(given), [0], [1])
        boxes, scores, classes, counts = of_each(after, found, limits.max_det, count)
        more = [described("counts", np.int64, ["batch"], counts)]
    else:
        (boxes, scores, classes, _), more = of_one(after, found, limits.max_det), []
    outputs = [
        described("boxes", np.float32, [*n, 4], boxes),
        described("scores", np.float32, n, scores),
        described("classes", np.int64, n, classes),
        *more,
    ]

    graph.insert_before(graph[0], before.nodes)
    graph.extend(after.nodes)
    graph.inputs[:] = [given, *(limit for limit in limits if limit is not None)]
    graph.outputs[:] = outputs
    for value in (*before.initializers, *after.initializers):
        graph.register_initializer(value)
    graph.name = "detector"
    return model
