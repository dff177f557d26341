"""`best.onnx`: the whole detector in one file, or with `--raw` the bare network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera import __version__
from tessera.utils.errors import UserError
from tessera.utils.exporting.formats import Format
from tessera.utils.exporting.metadata import describe
from tessera.utils.exporting.network import Network, export_network, inference_copy
from tessera.utils.exporting.subject import Subject
from tessera.utils.exporting.whole import export_whole
from tessera.utils.files import atomic_write

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


class Onnx(Format):
    """ONNX: read by ONNX Runtime, OpenVINO, TensorRT, Triton and others."""

    name, suffix, extra = "onnx", ".onnx", "export"
    packages = ("onnx", "onnx_ir", "onnxscript")
    variants = frozenset({"raw", "half", "end2end", "batched"})

    def write(self, subject: Subject, path: Path) -> Path:
        """As Format."""
        content = self.content(subject)
        try:
            with atomic_write(path) as file:
                file.write(content)
        except OSError as error:
            raise UserError(
                f"{path}: cannot write the export: {error.strerror or error}. Make room, or the folder writable."
            ) from error
        return path

    def content(self, subject: Subject) -> bytes:
        """What is in the file."""
        return onnx_bytes(subject)


def onnx_bytes(subject: Subject, *, raw: bool | None = None, half: bool | None = None) -> bytes:
    """The file's content, checked.

    Args:
        subject: what is exported.
        raw: the bare network; None = as the flags say.
        half: weights and features in float16; None = as the flags say.

    Raises:
        UserError: it is larger than an ONNX file can be.
    """
    import onnx

    config = subject.config
    model = onnx_model(subject, raw=config.raw if raw is None else raw, half=config.half if half is None else half)
    content: bytes = model.SerializeToString()
    if len(content) > _LARGEST:
        raise UserError(f"{subject.path}: {len(content):,} bytes as ONNX, at most {_LARGEST:,} fit into one file.")
    onnx.checker.check_model(content, full_check=True)
    return content


def onnx_model(subject: Subject, *, raw: bool, half: bool) -> Any:
    """An onnx.ModelProto, with its metadata."""
    import onnx_ir as ir

    config = subject.config
    model = inference_copy(subject.model, half=half)
    network = Network(model, half=half, joined=raw)
    if raw:
        made = export_network(network, subject.size_hw, opset=config.opset)
    else:
        made = export_whole(network, subject.imgsz, batched=config.batched, opset=config.opset)
    made.producer_name, made.producer_version = "tessera", __version__
    made.doc_string = _USAGE_RAW if raw else _USAGE_BATCHED if config.batched else _USAGE
    made.metadata_props.update(describe(subject, whole=not raw))
    return ir.to_proto(made)
