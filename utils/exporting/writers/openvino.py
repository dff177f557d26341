"""`best.xml` with `best.bin`: the same graph as best.onnx, in OpenVINO's own form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.utils.exporting.job import ExportJob
from tessera.utils.exporting.quantized.openvino_int8 import quantize_openvino
from tessera.utils.exporting.writers.onnx_file import onnx_bytes
from tessera.utils.machine.extras import import_extra
from tessera.utils.runtime.openvino import SECTION


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
