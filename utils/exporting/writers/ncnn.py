"""`best.ncnn.param` and `best.ncnn.bin`: the bare network for ncnn, converted by pnnx, and `best.ncnn.json` beside."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tessera.utils.errors import UserError
from tessera.utils.exporting.bare_network import BareNetwork
from tessera.utils.exporting.job import ExportJob
from tessera.utils.exporting.metadata import describe
from tessera.utils.machine.extras import import_extra
from tessera.utils.text import strict_json


def write_ncnn(job: ExportJob, path: Path) -> None:
    """As `Format.write`."""
    pnnx = import_extra("pnnx", "ncnn", "--include ncnn")
    network, images, metadata = network_of_one_size(job)
    with tempfile.TemporaryDirectory() as folder:  # pnnx leaves more files than these
        with torch.no_grad():
            pnnx.export(network, f"{folder}/best.pt", (images,), check_trace=False, fp16=False, optlevel=2)
        for suffix in (".bin", ".param"):
            made = Path(folder) / f"best.ncnn{suffix}"
            if not made.is_file():
                raise UserError(f"--include ncnn: pnnx does not convert {job.path.name}. Use --include onnx.")
            path.with_suffix(suffix).write_bytes(made.read_bytes())
    path.with_suffix(".json").write_text(strict_json(metadata), encoding="utf-8")


def network_of_one_size(job: ExportJob) -> tuple[BareNetwork, torch.Tensor, dict[str, str]]:
    """The network, one image of the size that it is made for, and the metadata that says so."""
    height, width = job.size_hw or (job.imgsz, job.imgsz)
    metadata = {**describe(job, whole=False), "size_hw": strict_json([height, width])}
    return BareNetwork(job.model), torch.rand(1, job.model.channels, height, width), metadata
