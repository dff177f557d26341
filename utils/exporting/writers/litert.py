"""`best.tflite`: the bare network for LiteRT, converted by litert-torch; the metadata is an archive behind it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch

from tessera.utils.exporting.job import ExportJob
from tessera.utils.exporting.writers.ncnn import network_of_one_size
from tessera.utils.machine.extras import import_extra
from tessera.utils.runtime.exported import METADATA
from tessera.utils.text import strict_json


def write_litert(job: ExportJob, path: Path) -> None:
    """As `Format.write`."""
    litert_torch = import_extra("litert_torch", "litert", "--include litert")
    network, images, metadata = network_of_one_size(job)
    with torch.no_grad():
        litert_torch.convert(network, (images,)).export(str(path))
    append_metadata(path, metadata)


def append_metadata(path: Path, metadata: dict[str, str]) -> None:
    """Add an archive to the end of a file, where readers of the network do not look."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(METADATA, strict_json(metadata))
