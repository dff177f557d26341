"""`best.ncnn.param` and `best.ncnn.bin`: the bare network for ncnn, converted by pnnx, and `best.ncnn.json` beside."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tessera.utils.errors import UserError
from tessera.utils.exporting.formats import Format
from tessera.utils.exporting.metadata import describe
from tessera.utils.exporting.network import Network, inference_copy
from tessera.utils.exporting.subject import Subject
from tessera.utils.exporting.writers.staged import put_in_place
from tessera.utils.machine.extras import import_extra
from tessera.utils.text import strict_json


class Ncnn(Format):
    """ncnn: phones and small boards. The network takes one size: square, or `--raw --imgsz H W`."""

    name, suffix, extra = "ncnn", ".ncnn.param", "ncnn"
    packages = ("pnnx",)
    variants = frozenset({"raw", "end2end"})

    def write(self, subject: Subject, path: Path) -> Path:
        """As Format."""
        pnnx = import_extra("pnnx", "ncnn", "--include ncnn")
        network, images, metadata = fixed_network(subject)
        with tempfile.TemporaryDirectory() as folder:
            stem = Path(folder) / "best"
            with torch.no_grad():
                pnnx.export(network, f"{stem}.pt", (images,), check_trace=False, fp16=False, optlevel=2)
            written = {suffix: Path(f"{stem}.ncnn.{suffix}") for suffix in ("bin", "param")}
            if not all(one.is_file() for one in written.values()):
                raise UserError(f"--include ncnn: pnnx does not convert {subject.path.name}. Use --include onnx.")
            described = Path(folder) / "described.json"
            described.write_text(strict_json(metadata), encoding="utf-8")
            put_in_place(
                {
                    written["bin"]: path.with_suffix(".bin"),
                    described: path.with_suffix(".json"),
                    written["param"]: path,
                }
            )
        return path


def fixed_network(subject: Subject) -> tuple[Network, torch.Tensor, dict[str, str]]:
    """The network, one image of the size that it is made for, and the metadata that says so."""
    height, width = subject.size_hw or (subject.imgsz, subject.imgsz)
    network = Network(inference_copy(subject.model), joined=True).eval()
    metadata = {**describe(subject, whole=False), "size_hw": strict_json([height, width])}
    return network, torch.rand(1, subject.model.channels, height, width), metadata
