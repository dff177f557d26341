"""Export to TorchScript, torch.export, ncnn and LiteRT (predictions without NMS), and of weights alone."""

from __future__ import annotations

import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from tessera.deploy.exporting.job import ExportJob
from tessera.deploy.exporting.metadata import describe
from tessera.deploy.exporting.raw_network import RawNetwork
from tessera.deploy.foreign.safetensors_file import save_safetensors
from tessera.deploy.runtime.exported import METADATA
from tessera.utils.checkpoints.format import describe_metrics, describe_run, save_checkpoint
from tessera.utils.errors import UserError
from tessera.utils.flags.program import program_version
from tessera.utils.machine.optional_packages import import_extra
from tessera.utils.text import strict_json


def write_torchscript(job: ExportJob, path: Path) -> None:
    network = RawNetwork(job.model)
    images, _ = network.example(job.size_hw)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated, and that Python's numbers are traced
        traced = torch.jit.trace(network, images, check_trace=False)
        torch.jit.save(traced, path, _extra_files={METADATA: strict_json(describe(job, whole=False))})


def write_pt2(job: ExportJob, path: Path) -> None:
    network = RawNetwork(job.model)
    images, free = network.example(job.size_hw)
    with torch.no_grad():
        program = torch.export.export(network, (images,), dynamic_shapes=(free,))
    torch.export.save(program, path, extra_files={METADATA: strict_json(describe(job, whole=False))})


def write_ncnn(job: ExportJob, path: Path) -> None:
    """As `Format.write`: .ncnn.param and .ncnn.bin, converted by pnnx, and .ncnn.json with the metadata."""
    pnnx = import_extra("pnnx", "ncnn", "--include ncnn")
    network, images, metadata = _of_one_size(job)
    with tempfile.TemporaryDirectory() as folder:  # pnnx writes other files too
        with torch.no_grad():
            pnnx.export(network, f"{folder}/best.pt", (images,), check_trace=False, fp16=False, optlevel=2)
        for suffix in (".bin", ".param"):
            made = Path(folder) / f"best.ncnn{suffix}"
            if not made.is_file():
                raise UserError(f"--include ncnn: pnnx cannot convert {job.path.name}. Use --include onnx.")
            path.with_suffix(suffix).write_bytes(made.read_bytes())
    path.with_suffix(".json").write_text(strict_json(metadata), encoding="utf-8")


def write_litert(job: ExportJob, path: Path) -> None:
    """As `Format.write`, converted by litert-torch."""
    litert_torch = import_extra("litert_torch", "litert", "--include litert")
    network, images, metadata = _of_one_size(job)
    with torch.no_grad():
        litert_torch.convert(network, (images,)).export(str(path))
    append_metadata(path, metadata)


def append_metadata(path: Path, metadata: dict[str, str]) -> None:
    """Append a zip archive, which readers of the network ignore."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(METADATA, strict_json(metadata))


def _of_one_size(job: ExportJob) -> tuple[RawNetwork, torch.Tensor, dict[str, str]]:
    height, width = job.size_hw or (job.imgsz, job.imgsz)
    metadata = {**describe(job, whole=False), "size_hw": strict_json([height, width])}
    return RawNetwork(job.model), torch.rand(1, job.model.channels, height, width), metadata


def write_safetensors(job: ExportJob, path: Path) -> None:
    save_safetensors(path, job.weights, describe(job, whole=False), half=job.config.half)


def write_small_pt(job: ExportJob, path: Path) -> None:
    """As `Format.write`: a checkpoint without the optimizer, with `--half` in float16."""
    content: dict[str, Any] = dict(job.weights.checkpoint or {})
    if not content:  # another program's; its file name tells the licence of the weights
        run = describe_run(job.model, {"weights": job.path.name}, {}, job.imgsz, "")
        state = {"ema": dict(job.weights.state_dict), "epoch": 0, "imgsz": job.weights.imgsz}
        content = {**run, **program_version(), **describe_metrics(None), **state}
    if job.config.half:
        floats = {name: tensor for name, tensor in content["ema"].items() if tensor.is_floating_point()}
        content["ema"] = {**content["ema"], **{name: tensor.half() for name, tensor in floats.items()}}
    save_checkpoint(path, content)
