"""The runtime of an exported file, by its suffix."""

from __future__ import annotations

from pathlib import Path

import torch

from tessera.utils.checkpoints.weights import EXPORTED
from tessera.utils.errors import UserError, did_you_mean
from tessera.utils.inference.backends.exported import ExportedDetector, ExportedNetwork, MissingDevice, errors_of
from tessera.utils.inference.backends.litert import open_litert
from tessera.utils.inference.backends.ncnn import open_ncnn
from tessera.utils.inference.backends.onnxruntime import open_onnx
from tessera.utils.inference.backends.openvino import open_openvino
from tessera.utils.inference.backends.torch_files import open_pt2, open_torchscript
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.out_of_memory import explain_out_of_memory_of
from tessera.utils.ranks.signals import signals_end_at_once

PROGRAMS = {".torchscript", ".pt2"}  # to load one is to run what is in it


def is_exported(name: str) -> bool:
    """Whether `--weights` names an exported file, not a checkpoint."""
    return Path(name).suffix.lower() in EXPORTED


def open_exported(
    name: str | Path, accelerator: Accelerator, *, trust_file: bool = False, threads: int = 0
) -> ExportedDetector | ExportedNetwork:
    """Open a file of export.py in the runtime that it is made for.

    Args:
        name: as given with --weights.
        accelerator: what it must be computed on.
        trust_file: a file that is a program may run; else it is refused, and nothing of it is read.
        threads: of the CPU; 0 = as many as torch uses.

    Raises:
        UserError: there is no such file, it is damaged, it is a program that is not trusted, its runtime is missing or
            lacks the device, or another program made it.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        beside = [found.name for found in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(
            f"--weights {name}: no such file.{did_you_mean(path.name, beside)} Expected a file that export.py wrote."
        )
    suffix = path.suffix.lower()
    if suffix in PROGRAMS and not trust_file:
        raise UserError(
            f"--weights {name}: a {suffix} file is a program; to load it can run anything with your rights. Give "
            "--trust-file (Python: trust_file=True) where you trust its maker; else take the checkpoint, or a file of "
            "export.py --include onnx, which holds no code."
        )
    if suffix in (".param", ".tflite") and not accelerator.is_host:
        raise MissingDevice(f"--weights {name}: computed on the CPU alone here. Give --device cpu.")
    with (
        errors_of(EXPORTED[suffix], path, "load"),
        explain_out_of_memory_of(path, accelerator),
        signals_end_at_once(),  # a runtime may never come back from a file
    ):
        return _open(path, suffix, accelerator, threads or torch.get_num_threads())


def _open(path: Path, suffix: str, accelerator: Accelerator, threads: int) -> ExportedDetector | ExportedNetwork:
    if suffix == ".onnx":
        return open_onnx(path, accelerator, threads)
    if suffix == ".xml":
        return open_openvino(path, accelerator, threads)
    if suffix == ".torchscript":
        return open_torchscript(path, accelerator)
    if suffix == ".pt2":
        return open_pt2(path, accelerator)
    return open_ncnn(path, accelerator, threads) if suffix == ".param" else open_litert(path, accelerator, threads)
