"""Files of torch itself: TorchScript, programs of torch.export, and weights alone, as .pt and in safetensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from tessera.utils.checkpoints.format import save_checkpoint
from tessera.utils.checkpoints.provenance import describe_metrics, describe_run, written_by
from tessera.utils.checkpoints.weights import save_safetensors
from tessera.utils.exporting.bare_network import BareNetwork
from tessera.utils.exporting.job import ExportJob
from tessera.utils.exporting.metadata import describe
from tessera.utils.runtime.exported import METADATA
from tessera.utils.text import strict_json


def write_torchscript(job: ExportJob, path: Path) -> None:
    """As `Format.write`."""
    network = BareNetwork(job.model)
    images, _ = network.example(job.size_hw)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated, and that Python's numbers are traced
        traced = torch.jit.trace(network, images, check_trace=False)
        torch.jit.save(traced, path, _extra_files=_metadata(job))


def write_pt2(job: ExportJob, path: Path) -> None:
    """As `Format.write`."""
    network = BareNetwork(job.model)
    images, free = network.example(job.size_hw)
    with torch.no_grad():
        program = torch.export.export(network, (images,), dynamic_shapes=(free,))
    torch.export.save(program, path, extra_files=_metadata(job))


def write_safetensors(job: ExportJob, path: Path) -> None:
    """As `Format.write`."""
    save_safetensors(path, job.weights, describe(job, whole=False), half=job.config.half)


def write_small_pt(job: ExportJob, path: Path) -> None:
    """As `Format.write`: what best.pt is, of any checkpoint; with `--half` in float16, half as large."""
    content: dict[str, Any] = dict(job.weights.checkpoint or _described(job))
    if job.config.half:
        floats = {name: tensor for name, tensor in content["ema"].items() if tensor.is_floating_point()}
        content["ema"] = {**content["ema"], **{name: tensor.half() for name, tensor in floats.items()}}
    save_checkpoint(path, content)


def _described(job: ExportJob) -> dict[str, Any]:
    """What best.pt is, of a file of another program; its name is what says which licence its weights have."""
    return {
        **describe_run(job.model, {"weights": job.path.name}, {}, job.imgsz, ""),
        **written_by(),
        **describe_metrics(None),
        "ema": dict(job.weights.state_dict),
        "epoch": 0,
        "imgsz": job.weights.imgsz,
    }


def _metadata(job: ExportJob) -> dict[str, str]:
    return {METADATA: strict_json(describe(job, whole=False))}
