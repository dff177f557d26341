"""Files that torch itself computes without Tessera's code: TorchScript, and programs of torch.export (.pt2).

Both are programs. To load one can run anything, so they are opened where the user trusts the file alone.
"""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.runtime.exported import METADATA, Description, ExportedNetwork, plain_strings


class TorchFileNetwork(ExportedNetwork):
    """The bare network, on a device of torch."""

    def __init__(self, description: Description, accelerator: Accelerator, module: Any, kind: str) -> None:
        super().__init__(description, accelerator, f"{kind}, {accelerator.device}")
        self._module = module

    def predict(self, images: NDArray[np.float32]) -> NDArray[Any]:
        """As ExportedNetwork."""
        with torch.no_grad():
            found = self._module(torch.from_numpy(images).to(self.accelerator.device))
        return np.asarray((found[0] if isinstance(found, (tuple, list)) else found).float().cpu().numpy())


def open_torchscript(path: Path, accelerator: Accelerator) -> TorchFileNetwork:
    """Open a TorchScript file of export.py. What is in it runs, here and when it computes: nothing holds it back.

    Raises:
        UserError: another program made it.
        Exception: whatever its reader meets in a damaged archive.
    """
    extra = {METADATA: ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        module = torch.jit.load(path, accelerator.device, _extra_files=extra)
    description = Description.read(plain_strings(extra[METADATA]), path)
    return TorchFileNetwork(description, accelerator, module.eval(), "TorchScript")


def open_pt2(path: Path, accelerator: Accelerator) -> TorchFileNetwork:
    """Open a program of torch.export that export.py wrote. What is in it runs: its format has pickles and expressions.

    Raises:
        UserError: another program made it.
        Exception: whatever its reader meets in a damaged archive.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError("no archive")
    extra = {METADATA: ""}
    program = torch.export.load(path, extra_files=extra)
    description = Description.read(plain_strings(extra[METADATA]), path)
    return TorchFileNetwork(description, accelerator, program.module().to(accelerator.device), "torch.export")
