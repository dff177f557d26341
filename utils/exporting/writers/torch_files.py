"""Files of torch itself: TorchScript, programs of torch.export, and weights in safetensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from tessera.utils.checkpoints.safetensors import save_safetensors
from tessera.utils.exporting.formats import Format
from tessera.utils.exporting.metadata import describe
from tessera.utils.exporting.network import MOST_CELLS, Network, inference_copy
from tessera.utils.exporting.subject import Subject
from tessera.utils.exporting.writers.staged import staged_file
from tessera.utils.runtime.torch_files import METADATA
from tessera.utils.text import strict_json

_CELLS = 5, 4  # of the example's sides, in strides: unequal, and none that a model would treat as special


class TorchScript(Format):
    """The bare network in TorchScript, for programs that load such files; torch itself recommends torch.export."""

    name, suffix = "torchscript", ".torchscript"
    variants = frozenset({"raw", "end2end"})

    def write(self, subject: Subject, path: Path) -> Path:
        """As Format."""
        network, images = _network(subject)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that TorchScript is deprecated, and that Python's numbers are traced
            traced = torch.jit.trace(network, images, check_trace=False)
            with staged_file(path) as staged:
                torch.jit.save(traced, staged, _extra_files={METADATA: _metadata(subject)})
        return path


class Pt2(Format):
    """The bare network as a program of torch.export: exact, and loaded without Tessera."""

    name, suffix = "pt2", ".pt2"
    variants = frozenset({"raw", "end2end"})

    def write(self, subject: Subject, path: Path) -> Path:
        """As Format."""
        network, images = _network(subject)
        free: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
        if subject.size_hw is None:
            stride = subject.model.stride
            for axis, name in ((2, "height_cells"), (3, "width_cells")):
                free[axis] = stride * torch.export.Dim(name, min=1, max=MOST_CELLS)
        with torch.no_grad():
            program = torch.export.export(network, (images,), dynamic_shapes=(free,))
        with staged_file(path) as staged:
            torch.export.save(program, staged, extra_files={METADATA: _metadata(subject)})
        return path


class Safetensors(Format):
    """Weights and what a model needs to be built from them, without a line of code: `--weights best.safetensors`."""

    name, suffix, extra = "safetensors", ".safetensors", "safetensors"
    packages = ("safetensors",)
    variants = frozenset({"half"})

    def write(self, subject: Subject, path: Path) -> Path:
        """As Format."""
        save_safetensors(path, subject.weights, describe(subject, whole=False), half=subject.config.half)
        return path


def _network(subject: Subject) -> tuple[Network, torch.Tensor]:
    """The network and an example of its input."""
    network = Network(inference_copy(subject.model), joined=True).eval()
    stride = subject.model.stride
    height, width = subject.size_hw or (stride * _CELLS[0], stride * _CELLS[1])
    return network, torch.zeros(2, subject.model.channels, height, width)


def _metadata(subject: Subject) -> str:
    return strict_json(describe(subject, whole=False))
