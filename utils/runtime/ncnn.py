"""ncnn files: the network's .ncnn.param and .ncnn.bin, with the metadata in .ncnn.json beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.utils.errors import UserError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.extras import import_extra
from tessera.utils.runtime.exported import Description, ExportedNetwork, plain_strings

INPUT, OUTPUT = "in0", "out0"  # pnnx's names


class NcnnNetwork(ExportedNetwork):
    """The bare network; it takes one image at a time."""

    batch = 1

    def __init__(self, description: Description, accelerator: Accelerator, ncnn: Any, net: Any) -> None:
        super().__init__(description, accelerator, "ncnn, cpu")
        self._ncnn, self._net = ncnn, net

    def predict(self, images: NDArray[np.float32]) -> NDArray[Any]:
        """As ExportedNetwork."""
        with self._net.create_extractor() as extractor:
            extractor.input(INPUT, self._ncnn.Mat(images[0]).clone())
            code, found = extractor.extract(OUTPUT)
        if code:
            raise UserError(f"{self.description.path}: ncnn does not compute it (code {code}). Export it again.")
        rows = np.array(found)
        return rows.reshape(1, -1, rows.shape[-1])


def open_ncnn(path: Path, accelerator: Accelerator) -> NcnnNetwork:
    """Open an ncnn file of export.py.

    Raises:
        UserError: ncnn is missing; the file is damaged, or another program's.
    """
    weights, metadata = path.with_suffix(".bin"), path.with_suffix(".json")
    for other in (weights, metadata):
        if not other.is_file():
            raise UserError(f"{path}: {other.name} is not beside it. Copy all files that the export wrote.")
    description = Description.read(plain_strings(metadata.read_bytes()), path)
    ncnn = import_extra("ncnn", "ncnn", str(path))
    net = ncnn.Net()
    net.opt.num_threads = torch.get_num_threads()
    net.opt.use_vulkan_compute = False
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    net.opt.use_bf16_storage = False
    if net.load_param(str(path)) or net.load_model(str(weights)):
        raise UserError(f"{path}: ncnn does not load it. Export it again.")
    return NcnnNetwork(description, accelerator, ncnn, net)
