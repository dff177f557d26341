"""Files that torch itself computes without Tessera's code: TorchScript, and programs of torch.export (.pt2)."""

from __future__ import annotations

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from utils.errors import UserError
from utils.inference.backends.exported import Description, ExportedNetwork
from utils.machine.accelerator import Accelerator

METADATA = "tessera.json"  # an extra file in the archive


class TorchNetwork(ExportedNetwork):
    """The bare network, on a device of torch."""

    def __init__(self, description: Description, accelerator: Accelerator, module: Any, kind: str) -> None:
        super().__init__(description, accelerator, f"{kind}, {accelerator.device}")
        self._module = module

    def predict(self, images: NDArray[np.float32]) -> NDArray[Any]:
        """As ExportedNetwork."""
        with torch.no_grad():
            found = self._module(torch.from_numpy(images).to(self.accelerator.device))
        return np.asarray((found[0] if isinstance(found, (tuple, list)) else found).float().cpu().numpy())


def open_torchscript(path: Path, accelerator: Accelerator) -> TorchNetwork:
    """Open a TorchScript file of export.py. Its code runs in the sandbox of TorchScript's interpreter.

    Raises:
        UserError: the file is damaged, or another program's.
    """
    extra = {METADATA: ""}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that TorchScript is deprecated
            module = torch.jit.load(path, accelerator.device, _extra_files=extra)
    except (RuntimeError, ValueError) as error:
        raise _damaged(path, error) from error
    return TorchNetwork(Description.read(_strings(extra[METADATA]), path), accelerator, module.eval(), "TorchScript")


def open_pt2(path: Path, accelerator: Accelerator) -> TorchNetwork:
    """Open a program of torch.export that export.py wrote.

    Raises:
        UserError: the file is damaged, or another program's.
    """
    if not zipfile.is_zipfile(path):
        raise _damaged(path, ValueError("no archive"))
    extra = {METADATA: ""}
    try:
        program = torch.export.load(path, extra_files=extra)
        module = program.module().to(accelerator.device)
    except Exception as error:  # whatever its reader meets in a damaged archive
        raise _damaged(path, error) from error
    return TorchNetwork(Description.read(_strings(extra[METADATA]), path), accelerator, module, "torch.export")


def _strings(text: str | bytes) -> dict[str, str]:
    """The metadata of an archive; {} where it has none."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _damaged(path: Path, error: Exception) -> UserError:
    said = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return UserError(f"{path}: torch does not load it ({said}). Export it again.")
