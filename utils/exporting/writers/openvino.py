"""`best.xml` with `best.bin`: the same graph as best.onnx, in OpenVINO's own form."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tessera.utils.exporting.formats import Format
from tessera.utils.exporting.onnx_file import onnx_bytes
from tessera.utils.exporting.quantized.openvino_int8 import quantize
from tessera.utils.exporting.subject import Subject
from tessera.utils.exporting.writers.staged import put_in_place
from tessera.utils.machine.extras import import_extra
from tessera.utils.runtime.openvino import SECTION


class OpenVino(Format):
    """OpenVINO: Intel's processors and graphics."""

    name, suffix, extra = "openvino", ".xml", "openvino"
    packages = ("onnx", "onnxscript", "openvino")
    variants = frozenset({"raw", "half", "int8", "end2end"})

    def write(self, subject: Subject, path: Path) -> Path:
        """As Format; with `--half` the weights are stored as float16, and computed with in float32."""
        model = openvino_model(onnx_bytes(subject, half=False))
        if subject.config.int8:
            model = quantize(model, subject)
        save_openvino(model, path, half=subject.config.half)
        return path


def openvino_model(content: bytes) -> Any:
    """An ONNX file as a model of OpenVINO, with its metadata."""
    onnx = import_extra("onnx", "export", "openvino")
    openvino = import_extra("openvino", "openvino", "openvino")
    model = openvino.Core().read_model(content)
    for entry in onnx.load_from_string(content).metadata_props:
        model.set_rt_info(entry.value, [SECTION, entry.key])
    return model


def save_openvino(model: Any, path: Path, *, half: bool = False) -> None:
    """Write both files.

    Raises:
        UserError: they cannot be written.
    """
    openvino = import_extra("openvino", "openvino", str(path))
    with tempfile.TemporaryDirectory() as folder:
        staged = Path(folder) / path.name
        openvino.save_model(model, staged, compress_to_fp16=half)
        put_in_place({staged.with_suffix(".bin"): path.with_suffix(".bin"), staged: path})
