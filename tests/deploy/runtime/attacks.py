"""Malicious exported files: each writes a file when it is loaded or run."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.deploy.runtime.made_files import STRINGS


class WritesWhenLoaded(nn.Module):
    """TorchScript that maps a file and writes to it while it is loaded."""

    def __init__(self, trace: str) -> None:
        super().__init__()
        self.trace, self.written = trace, 0

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.trace, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.trace = state[0]
        self.training = state[1]
        mapped = torch.from_file(self.trace, True, 4, dtype=torch.uint8).copy_(torch.ones(4, dtype=torch.uint8))
        self.written = int(mapped.sum())  # else the compiler would leave it out

    def forward(self, images: Tensor) -> Tensor:
        return images


class WritesWhenRun(nn.Module):
    """TorchScript that saves a tensor where it likes."""

    def __init__(self, trace: str) -> None:
        super().__init__()
        self.trace = trace

    def forward(self, images: Tensor) -> Tensor:
        torch.save(images, self.trace)
        return torch.zeros(images.shape[0], 4, 7)


def write_script(path: Path, module: nn.Module, strings: dict[str, str] = STRINGS) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), path, _extra_files={"tessera.json": json.dumps(strings)})
    return path


def attack_files(folder: Path, trace: Path) -> dict[str, Path]:
    """Every attack by its name; each writes to `trace`."""
    return {
        "loaded script": write_script(folder / "loaded.torchscript", WritesWhenLoaded(str(trace))),
        "running script": write_script(folder / "running.torchscript", WritesWhenRun(str(trace))),
    }
