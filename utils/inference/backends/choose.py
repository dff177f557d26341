"""The runtime of an exported file, by its suffix."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from utils.errors import UserError, did_you_mean
from utils.inference.backends.exported import ExportedDetector, ExportedNetwork, MissingDevice
from utils.inference.backends.litert import open_litert
from utils.inference.backends.ncnn import open_ncnn
from utils.inference.backends.onnxruntime import open_onnx
from utils.inference.backends.openvino import open_openvino
from utils.inference.backends.torch_files import open_pt2, open_torchscript
from utils.machine.accelerator import Accelerator

log = logging.getLogger(__name__)

SUFFIXES = {".onnx", ".xml", ".torchscript", ".pt2", ".param", ".tflite"}


def is_exported(name: str) -> bool:
    """Whether `--weights` names an exported file, not a checkpoint."""
    return Path(name).suffix.lower() in SUFFIXES


def open_exported(
    name: str | Path, accelerator: Accelerator, *, threads: int = 0
) -> ExportedDetector | ExportedNetwork:
    """Open a file of export.py in the runtime that it is made for.

    Args:
        name: as given with --weights.
        accelerator: what it must be computed on.
        threads: of the CPU; 0 = as many as torch uses.

    Raises:
        UserError: there is no such file, its runtime is missing or lacks the device, or another program made it.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        beside = [found.name for found in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(
            f"--weights {name}: no such file.{did_you_mean(path.name, beside)} Expected a file that export.py wrote."
        )
    threads = threads or torch.get_num_threads()
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        return open_onnx(path, accelerator, threads)
    if suffix == ".xml":
        return open_openvino(path, accelerator, threads)
    if suffix == ".torchscript":
        return open_torchscript(path, accelerator)
    if suffix == ".pt2":
        return open_pt2(path, accelerator)
    if not accelerator.is_host:
        raise MissingDevice(f"--weights {name}: computed on the CPU alone here. Give --device cpu.")
    return open_ncnn(path, accelerator, threads) if suffix == ".param" else open_litert(path, accelerator, threads)
