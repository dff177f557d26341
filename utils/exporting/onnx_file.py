"""Writers of the whole detector, or with `--raw` of the bare network, as `best.onnx` and in OpenVINO's own form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tessera.utils.errors import UserError
from tessera.utils.exporting.graph import Nodes, Value, described
from tessera.utils.exporting.job import ExportJob
from tessera.utils.exporting.metadata import describe
from tessera.utils.exporting.postprocessing import Limits, detect, in_pictures, of_each, of_one
from tessera.utils.exporting.preprocessing import preprocess
from tessera.utils.exporting.quantized.onnx_int8 import quantize_onnx
from tessera.utils.exporting.quantized.openvino_int8 import quantize_openvino
from tessera.utils.exporting.quantized.rounding import PICTURES, round_weights
from tessera.utils.exporting.raw_network import BareNetwork, network_graph
from tessera.utils.flags.version import __version__
from tessera.utils.machine.optional_packages import import_extra
from tessera.utils.runtime.openvino import SECTION

_LARGEST = 2**31 - 1  # bytes of a protobuf
# What a viewer of the file shows.
_USAGE = """\
import numpy as np, onnxruntime
from PIL import Image
session = onnxruntime.InferenceSession("best.onnx")
image = np.asarray(Image.open("photo.jpg").convert("RGB"))
rules = {"conf": np.array([0.4], np.float32), "iou": np.array([0.45], np.float32), "max_det": np.array([300], np.int64)}
boxes, scores, classes = session.run(None, {"image": image, **rules})
"""
_USAGE_BATCHED = "images uint8 (B, H, W, 3) RGB of one size; counts (B,) says how many of a picture's rows are found."
_USAGE_RAW = "images float32 (B, 3, H, W) RGB in 0 … 1; predictions: cx, cy, w, h in pixels, then the classes' scores."


def write_onnx(job: ExportJob, path: Path) -> None:
    """As `Format.write`."""
    content = onnx_bytes(job, half=job.config.half)
    path.write_bytes(quantize_onnx(content, job) if job.config.int8 else content)


def write_openvino(job: ExportJob, path: Path) -> None:
    """As `Format.write`; with `--half` the weights are stored as float16, and computed with in float32."""
    openvino = import_extra("openvino", "openvino", "--include openvino")
    model = openvino_model(onnx_bytes(job))
    if job.config.int8:
        quantize_openvino(model, job)
    openvino.save_model(model, path, compress_to_fp16=job.config.half)


def openvino_model(content: bytes) -> Any:
    """An ONNX file as a model of OpenVINO, with its metadata."""
    onnx = import_extra("onnx", "export", "openvino")
    openvino = import_extra("openvino", "openvino", "openvino")
    model = openvino.Core().read_model(content)
    for entry in onnx.load_from_string(content).metadata_props:
        model.set_rt_info(entry.value, [SECTION, entry.key])
    return model


def onnx_bytes(job: ExportJob, *, half: bool = False) -> bytes:
    """The file's content in float32, or with weights and features in float16; checked, with its metadata.

    With `--int8` the weights of the convolutions that 8 bits are for are rounded, and still float32.

    Raises:
        UserError: it is larger than an ONNX file can be.
    """
    import onnx
    import onnx_ir as ir

    config = job.config
    network = BareNetwork(job.model, half=half, joined=config.raw)
    if config.int8:
        round_weights(network, job.quantized_weights, job.calibration_images(PICTURES))
    if config.raw:
        made = network_graph(network, job.size_hw, output="predictions", opset=config.opset)
    else:
        made = whole_graph(network, job.imgsz, batched=config.batched, opset=config.opset)
    made.producer_name, made.producer_version = "tessera", __version__
    made.doc_string = _USAGE_RAW if config.raw else _USAGE_BATCHED if config.batched else _USAGE
    made.metadata_props.update(describe(job, whole=not config.raw))
    content: bytes = ir.to_proto(made).SerializeToString()
    if len(content) > _LARGEST:
        raise UserError(f"{job.path}: {len(content):,} bytes as ONNX, at most {_LARGEST:,} fit into one file.")
    onnx.checker.check_model(content, full_check=True)
    return content


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
    images.name = "letterboxed"
    given = described("images" if batched else "image", np.uint8, [*["batch"] * batched, "height", "width", 3])
    pictures = given if batched else before.Unsqueeze(given, [0])
    placed = preprocess(before, pictures, imgsz, network.model.stride)
    ir.convenience.replace_all_uses_with(images, placed.images)

    after = Nodes("after")
    found = detect(after, decoded, limits, has_objectness=head.has_objectness)
    found = found._replace(boxes=in_pictures(after, found.boxes, placed))
    n: list[int | str] = ["batch", "n"] if batched else ["n"]
    counts: list[Value] = []
    if batched:
        count = after.Slice(after.Shape(given), [0], [1])
        boxes, scores, classes, *counts = of_each(after, found, limits.max_det, count)
    else:
        boxes, scores, classes, _ = of_one(after, found, limits.max_det)

    graph.insert_before(graph[0], before.nodes)
    graph.extend(after.nodes)
    graph.inputs[:] = [given, *(limit for limit in limits if limit is not None)]
    graph.outputs[:] = [
        described("boxes", np.float32, [*n, 4], boxes),
        described("scores", np.float32, n, scores),
        described("classes", np.int64, n, classes),
        *(described("counts", np.int64, ["batch"], each) for each in counts),
    ]
    for value in (*before.initializers, *after.initializers):
        graph.register_initializer(value)
    graph.name = "detector"
    return model
