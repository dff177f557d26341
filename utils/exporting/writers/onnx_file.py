"""`best.onnx`: the whole detector in one file, or with `--raw` the bare network."""

from __future__ import annotations

from pathlib import Path

from tessera.utils.errors import UserError
from tessera.utils.exporting.bare_network import BareNetwork, network_graph
from tessera.utils.exporting.job import ExportJob
from tessera.utils.exporting.metadata import describe
from tessera.utils.exporting.quantized.calibration import calibration_images, quantized_weights
from tessera.utils.exporting.quantized.onnx_int8 import quantize_onnx
from tessera.utils.exporting.quantized.rounding import PICTURES, round_weights
from tessera.utils.exporting.whole import whole_graph
from tessera.utils.flags.version import __version__

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
        round_weights(network, quantized_weights(job), calibration_images(job, PICTURES))
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
