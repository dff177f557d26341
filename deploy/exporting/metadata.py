"""Metadata of exported files: flat strings, the same in every format.

names                   JSON list in class order
format                  "tessera-detector 1": image in, boxes out; or "tessera-network 1": the bare network
color                   "RGB"
imgsz, stride           long side in pixels that images are resized to; multiple that their sides are padded to
size_hw                 JSON [height, width] of a bare network with a fixed size, or null
batched                 "true" where it takes a batch of images of one size
float_layers            JSON list of the layers that an 8-bit file computes in float32, or null
end2end                 "true" where each object is predicted once, without NMS
conf, iou, max_det      recommended thresholds
conf_per_class          JSON list of the confidences with the best F1 of each class, or null
metrics                 JSON of the validation metrics of the weights, or null
pixels                  JSON of the conversion of images with more than 8 bits, or null
weights_sha256          of the checkpoint
data, data_hash         dataset YAML of the training, and the digest of its training images
tessera_version, git    of the exporting program; the commit of a clone, or null
torch_version, license
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tessera.deploy.exporting.job import ExportJob
from tessera.deploy.runtime.exported import BARE, WHOLE
from tessera.utils.flags.model_zoo import licence_of, published_weights
from tessera.utils.flags.program import program_version
from tessera.utils.text import one_line, strict_json

_GRAPH_LICENSE = "Apache-2.0 (what Tessera adds)"


def describe(job: ExportJob, *, whole: bool) -> dict[str, str]:
    """Return the metadata of a file; `whole`: a detector with pre- and postprocessing, else the bare network."""
    weights, state = job.weights, job.weights.checkpoint or {}
    values: dict[str, Any] = {
        "names": list(job.model.names),
        "format": WHOLE if whole else BARE,
        "color": "RGB",
        "imgsz": job.imgsz,
        "stride": job.model.stride,
        "size_hw": None if whole else job.size_hw,
        "batched": whole and job.config.batched,
        "float_layers": job.float_layers if job.config.int8 else None,
        "end2end": not job.model.head.needs_nms,
        "conf": job.conf,
        "iou": job.config.iou_thres,
        "max_det": job.config.max_det,
        "conf_per_class": list(job.class_confs) or None,
        "metrics": state.get("metrics"),
        "pixels": state.get("pixels"),
        "weights_sha256": job.sha256,
        "data": weights.data,
        "data_hash": state.get("dataset_hash", ""),
        **program_version(),
        "torch_version": torch.__version__,
        "license": job.config.license or f"{_GRAPH_LICENSE}; {_of_weights(weights.family, state)}",
    }
    return {key: value if isinstance(value, str) else strict_json(value) for key, value in values.items()}


def _of_weights(family: str, state: Mapping[str, Any]) -> str:
    """Return what is known about the licence of the weights."""
    if family:
        return f"weights: a file of {_published_by(family)}"
    text, given = "weights: as their trainer says", state.get("config", {}).get("weights")  # a small file has no flags
    if not given or not isinstance(given, str):
        return text
    name = Path(given).name
    of = f", the name of a file of {_published_by(known.family)}" if (known := published_weights(name)) else ""
    return f"{text}; from {one_line(name, 80)}{of}"


def _published_by(family: str) -> str:
    return f"{family} (published weights of {family}: {licence_of(family)}; NOTICE goes with them)"
