"""Readers of exported networks without NMS inside: TorchScript, torch.export (.pt2), ncnn and LiteRT.

TorchScript and .pt2 files are programs: loading one can run anything. `open_exported` requires `--trust-file` for them.
"""

from __future__ import annotations

import threading
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export.passes import move_to_device_pass

from tessera.deploy.runtime.exported import METADATA, Description, ExportedNetwork, parse_metadata
from tessera.utils.errors import UserError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.optional_packages import import_extra


def open_torchscript(path: Path, accelerator: Accelerator) -> ExportedNetwork:
    """Open a TorchScript file; a UserError where it is another program's, any exception where it is damaged."""
    extra = {METADATA: ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        module = torch.jit.load(path, accelerator.device, _extra_files=extra)
    description = Description.read(parse_metadata(extra[METADATA]), path)
    return _torch_network(description, "TorchScript", accelerator, module.eval())


def open_pt2(path: Path, accelerator: Accelerator) -> ExportedNetwork:
    """Open a .pt2 file; as `open_torchscript`."""
    if not zipfile.is_zipfile(path):
        raise ValueError("no archive")
    extra = {METADATA: ""}
    program = torch.export.load(path, extra_files=extra)
    description = Description.read(parse_metadata(extra[METADATA]), path)
    program = move_to_device_pass(program, accelerator.device)  # constants too, which a module's `to` leaves
    return _torch_network(description, "torch.export", accelerator, program.module())


def _torch_network(description: Description, kind: str, accelerator: Accelerator, module: Any) -> ExportedNetwork:
    @torch.no_grad()
    def predict(images: NDArray[np.float32]) -> NDArray[Any]:
        found = module(torch.from_numpy(images).to(accelerator.device))
        return np.asarray((found[0] if isinstance(found, (tuple, list)) else found).float().cpu().numpy())

    return ExportedNetwork(description, f"{kind}, {accelerator.device}", accelerator, predict)


def open_ncnn(path: Path, accelerator: Accelerator) -> ExportedNetwork:
    """Open an ncnn file, .ncnn.param with .ncnn.bin and .ncnn.json; a UserError where it is damaged or foreign."""
    weights, metadata = path.with_suffix(".bin"), path.with_suffix(".json")
    for other in (weights, metadata):
        if not other.is_file():
            raise UserError(f"{path}: {other.name} is not beside it. Copy all files of the export.")
    description = Description.read(parse_metadata(metadata.read_bytes()), path)
    ncnn = import_extra("ncnn", "ncnn", str(path))
    net = ncnn.Net()
    net.opt.num_threads = torch.get_num_threads()
    net.opt.use_vulkan_compute = False
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    net.opt.use_bf16_storage = False
    if net.load_param(str(path)) or net.load_model(str(weights)):
        raise UserError(f"{path}: ncnn cannot load it. Export it again.")

    def predict(images: NDArray[np.float32]) -> NDArray[Any]:
        with net.create_extractor() as extractor:
            extractor.input("in0", ncnn.Mat(images[0]).clone())  # pnnx's names
            code, found = extractor.extract("out0")
        if code:
            raise UserError(f"{path}: ncnn cannot compute it (code {code}). Export it again.")
        rows = np.array(found)
        return rows.reshape(1, -1, rows.shape[-1])

    return ExportedNetwork(description, "ncnn, cpu", accelerator, predict, batch=1)


def open_litert(path: Path, accelerator: Accelerator) -> ExportedNetwork:
    """Open a LiteRT file with an appended archive of metadata; as `open_torchscript`."""
    try:
        with zipfile.ZipFile(path) as archive:
            strings = parse_metadata(archive.read(METADATA))
    except (zipfile.BadZipFile, NotImplementedError, KeyError, ValueError, OSError):
        strings = {}
    description = Description.read(strings, path)
    module = import_extra("ai_edge_litert.interpreter", "litert", str(path))
    interpreter = module.Interpreter(model_path=str(path), num_threads=torch.get_num_threads())
    interpreter.allocate_tensors()
    (taken,), (given, *_) = interpreter.get_input_details(), interpreter.get_output_details()
    one_caller = threading.Lock()

    def predict(images: NDArray[np.float32]) -> NDArray[Any]:
        with one_caller:
            interpreter.set_tensor(taken["index"], images)
            interpreter.invoke()
            return np.array(interpreter.get_tensor(given["index"]))

    return ExportedNetwork(description, "LiteRT, cpu", accelerator, predict, batch=int(taken["shape"][0]))
