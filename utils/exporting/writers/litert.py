"""`best.tflite`: the bare network for LiteRT, converted by litert-torch; the metadata is an archive behind it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch

from tessera.utils.exporting.formats import Format
from tessera.utils.exporting.subject import Subject
from tessera.utils.exporting.writers.ncnn import fixed_network
from tessera.utils.exporting.writers.staged import staged_file
from tessera.utils.machine.extras import import_extra
from tessera.utils.runtime.litert import METADATA
from tessera.utils.text import strict_json


class LiteRt(Format):
    """LiteRT (TensorFlow Lite): phones. The network takes one size: square, or `--raw --imgsz H W`."""

    name, suffix, extra = "litert", ".tflite", "litert"
    packages = ("litert_torch",)
    variants = frozenset({"raw", "end2end"})

    def write(self, subject: Subject, path: Path) -> Path:
        """As Format."""
        litert_torch = import_extra("litert_torch", "litert", "--include litert")
        network, images, metadata = fixed_network(subject)
        with staged_file(path) as staged:
            with torch.no_grad():
                litert_torch.convert(network, (images,)).export(str(staged))
            append_metadata(staged, metadata)
        return path


def append_metadata(path: Path, metadata: dict[str, str]) -> None:
    """Add an archive to the end of a file, where readers of the network do not look."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(METADATA, strict_json(metadata))
