"""ONNX and OpenVINO writers: the whole detector, or the bare network with `--raw`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tessera.deploy.exporting.graph import Nodes, Value, typed_value
from tessera.deploy.exporting.job import ExportJob
from tessera.deploy.exporting.metadata import describe
from tessera.deploy.exporting.postprocessing import Limits, batch_detections, detect, single_detections, to_image_pixels
from tessera.deploy.exporting.preprocessing import preprocess
from tessera.deploy.exporting.quantized.onnx_int8 import quantize_onnx
from tessera.deploy.exporting.quantized.openvino_int8 import quantize_openvino
from tessera.deploy.exporting.quantized.rounding import N_IMAGES, round_weights
from tessera.deploy.exporting.raw_network import RawNetwork, network_graph
from tessera.deploy.runtime.runtimes import SECTION
from tessera.utils.errors import UserError
from tessera.utils.flags.version import __version__
from tessera.utils.machine.optional_packages import import_extra

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
_USAGE_BATCHED = "images uint8 (B, H, W, 3) RGB of one size; counts (B,) are the numbers of detections."
_USAGE_RAW = "images float32 (B, 3, H, W) RGB in 0 … 1; predictions: cx, cy, w, h in pixels, then the classes' scores."


def write_onnx(job: ExportJob, path: Path) -> None:
    content = onnx_bytes(job, half=job.config.half)
    path.write_bytes(quantize_onnx(content, job) if job.config.int8 else content)


def write_openvino(job: ExportJob, path: Path) -> None:
    """As `Format.write`; with `--half` weights are stored as float16 and computed in float32."""
    openvino = import_extra("openvino", "openvino", "--include openvino")
    model = openvino_model(onnx_bytes(job))
    if job.config.int8:
        quantize_openvino(model, job)
    openvino.save_model(model, path, compress_to_fp16=job.config.half)


def openvino_model(content: bytes) -> Any:
    """Convert the content of an ONNX file, with its metadata, to an OpenVINO model."""
    onnx = import_extra("onnx", "export", "openvino")
    openvino = import_extra("openvino", "openvino", "openvino")
    model = openvino.Core().read_model(content)
    for entry in onnx.load_from_string(content).metadata_props:
        model.set_rt_info(entry.value, [SECTION, entry.key])
    return model


def onnx_bytes(job: ExportJob, *, half: bool = False) -> bytes:
    """Return the checked content of a file in float32 or float16.

    With `--int8` weights are rounded to 8-bit steps, but stored as float32.

    Raises:
        UserError: it is larger than an ONNX file can be.
    """
    import onnx
    import onnx_ir as ir

    config = job.config
    network = RawNetwork(job.model, half=half, joined=config.raw)
    if config.int8:
        round_weights(network, job.quantized_weights, job.calibration_images(N_IMAGES))
    if config.raw:
        made = network_graph(network, job.size_hw, output="predictions", opset=config.opset)
    else:
        made = whole_graph(network, job.imgsz, batched=config.batched, opset=config.opset)
    made.producer_name, made.producer_version = "tessera", __version__
    made.doc_string = _USAGE_RAW if config.raw else _USAGE_BATCHED if config.batched else _USAGE
    made.metadata_props.update(describe(job, whole=not config.raw))
    content: bytes = ir.to_proto(made).SerializeToString()
    if len(content) > _LARGEST:
        raise UserError(
            f"{job.path}: {len(content):,} bytes as ONNX; expected at most {_LARGEST:,}, the limit of a file."
        )
    onnx.checker.check_model(content, full_check=True)
    return content


def whole_graph(network: RawNetwork, imgsz: int, *, batched: bool, opset: int) -> Value:
    """Return a model of onnx_ir: `image` uint8 (H, W, 3) RGB to `boxes`, `scores`, `classes` in pixels of the image.

    The inputs `conf`, `iou` and `max_det` have no default: of those, JavaScript's ONNX Runtime, OpenVINO, OpenCV and
    TensorRT would use the default whatever is given. A network without NMS has no `iou`.

    `network` is not joined. With `batched` the input is `images` (B, H, W, 3) of one size, outputs are (B, n, …), and
    `counts` (B,) are the numbers of detections.
    """
    import onnx_ir as ir

    model = network_graph(network, None, output="decoded", opset=opset)
    graph = model.graph
    (images,), (decoded,) = graph.inputs, graph.outputs
    head = network.model.head
    limits = Limits(
        typed_value("conf", np.float32, [1]),
        typed_value("iou", np.float32, [1]) if head.needs_nms else None,
        typed_value("max_det", np.int64, [1]),
    )

    before = Nodes("before")
    images.name = "letterboxed"
    given = typed_value("images" if batched else "image", np.uint8, [*["batch"] * batched, "height", "width", 3])
    pixels = given if batched else before.Unsqueeze(given, [0])
    placed = preprocess(before, pixels, imgsz, network.model.stride)
    ir.convenience.replace_all_uses_with(images, placed.images)

    after = Nodes("after")
    found = detect(after, decoded, limits, has_objectness=head.has_objectness)
    found = found._replace(boxes=to_image_pixels(after, found.boxes, placed))
    n: list[int | str] = ["batch", "n"] if batched else ["n"]
    counts: list[Value] = []
    if batched:
        count = after.Slice(after.Shape(given), [0], [1])
        boxes, scores, classes, *counts = batch_detections(after, found, limits.max_det, count)
    else:
        boxes, scores, classes, _ = single_detections(after, found, limits.max_det)

    graph.insert_before(graph[0], before.nodes)
    graph.extend(after.nodes)
    graph.inputs[:] = [given, *(limit for limit in limits if limit is not None)]
    graph.outputs[:] = [
        typed_value("boxes", np.float32, [*n, 4], boxes),
        typed_value("scores", np.float32, n, scores),
        typed_value("classes", np.int64, n, classes),
        *(typed_value("counts", np.int64, ["batch"], each) for each in counts),
    ]
    for value in (*before.initializers, *after.initializers):
        graph.register_initializer(value)
    graph.name = "detector"
    return model
