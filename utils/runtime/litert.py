"""LiteRT files (.tflite), with the metadata as an archive behind the network."""

from __future__ import annotations

import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.extras import import_extra
from tessera.utils.runtime.exported import METADATA, Description, ExportedNetwork, plain_strings


class LiteRtNetwork(ExportedNetwork):
    """The bare network; it takes the batch that it was made for, and one caller at a time."""

    def __init__(self, description: Description, accelerator: Accelerator, interpreter: Any) -> None:
        super().__init__(description, accelerator, "LiteRT, cpu")
        self._interpreter, self._one_caller = interpreter, threading.Lock()
        interpreter.allocate_tensors()
        (self._input,), (self._output, *_) = interpreter.get_input_details(), interpreter.get_output_details()
        self.batch = int(self._input["shape"][0])

    def predict(self, images: NDArray[np.float32]) -> NDArray[Any]:
        """As ExportedNetwork."""
        with self._one_caller:
            self._interpreter.set_tensor(self._input["index"], images)
            self._interpreter.invoke()
            return np.array(self._interpreter.get_tensor(self._output["index"]))


def open_litert(path: Path, accelerator: Accelerator) -> LiteRtNetwork:
    """Open a LiteRT file of export.py.

    Raises:
        UserError: LiteRT is missing; or another program made the file.
        RuntimeError, ValueError: the file is damaged.
    """
    description = Description.read(_strings(path), path)
    module = import_extra("ai_edge_litert.interpreter", "litert", str(path))
    interpreter = module.Interpreter(model_path=str(path), num_threads=torch.get_num_threads())
    return LiteRtNetwork(description, accelerator, interpreter)


def _strings(path: Path) -> dict[str, str]:
    """The metadata of a file; {} where it has none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return plain_strings(archive.read(METADATA))
    except (zipfile.BadZipFile, NotImplementedError, KeyError, ValueError, OSError):
        return {}
