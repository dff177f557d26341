"""ONNX files, by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.host import MOST_AT_ONCE
from tessera.utils.machine.optional_packages import import_extra
from tessera.utils.runtime.exported import Description, ExportedDetector, ExportedNetwork, MissingDevice


class _Session:
    """A file in ONNX Runtime.

    Args:
        open_with: opens it with so many threads a run.
        is_host: it computes on the CPU.

    Attributes:
        opened: the `InferenceSession`.
    """

    def __init__(self, open_with: Callable[[int], Any], is_host: bool) -> None:
        self._open_with, self._threads = open_with, torch.get_num_threads() if is_host else 1
        self.opened = open_with(self._threads)
        self._pool: ThreadPoolExecutor | None = None

    def compute_apart(self) -> int:
        """As Model: a network this small computes a picture on one thread in little more time than on two."""
        at_once = min(self._threads, MOST_AT_ONCE)
        if at_once > 1 and self._pool is None:
            self.opened = self._open_with(self._threads // at_once)
            self._pool = ThreadPoolExecutor(at_once, "ONNX Runtime")
        return at_once

    def rows(self, name: str, images: NDArray[Any]) -> NDArray[Any]:
        """What a bare network with this input predicts for the images."""
        return np.asarray(self.opened.run(None, {name: images})[0])

    def rows_apart(self, name: str, images: NDArray[Any]) -> NDArray[Any]:
        """The same, image by image where these are computed apart."""
        if self._pool is None or len(images) == 1:
            return self.rows(name, images)
        return np.concatenate([*self._pool.map(partial(self.rows, name), np.split(images, len(images)))])

    def detect(self, inputs: dict[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        """Boxes, scores and classes of a picture, of a file that takes one or several."""
        if "images" not in inputs:
            found: Sequence[NDArray[Any]] = self.opened.run(["boxes", "scores", "classes"], inputs)
            return found
        inputs["images"] = inputs["images"][None]
        *found, counts = self.opened.run(["boxes", "scores", "classes", "counts"], inputs)
        return [part[0, : counts[0]] for part in found]


def open_onnx(path: Path, accelerator: Accelerator) -> ExportedNetwork | ExportedDetector:
    """Open an ONNX file of export.py.

    Raises:
        UserError: ONNX Runtime is missing or lacks the provider; or another program made the file.
        Exception: of a class for each of the runtime's codes: the file is damaged.
    """
    library = import_extra("onnxruntime", "export", str(path))
    providers = accelerator.onnx_providers
    _require(providers[0], library.get_available_providers(), path)

    def open_with(threads: int) -> Any:
        options = library.SessionOptions()
        options.log_severity_level = 3  # errors alone
        options.intra_op_num_threads = threads
        # Between two pictures its threads would keep the cores busy that decoding, suppression and others need.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return library.InferenceSession(str(path), options, providers=list(providers))

    session = _Session(open_with, accelerator.is_host)
    opened = session.opened
    _require(providers[0], opened.get_providers(), path)
    inputs = "; ".join(f"{value.name} {value.type} {value.shape}" for value in opened.get_inputs())
    strings = dict(opened.get_modelmeta().custom_metadata_map)
    description = Description.read(strings, path, f"its inputs: {inputs}")
    runtime, apart = f"ONNX Runtime, {opened.get_providers()[0]}", session.compute_apart
    if not description.whole:
        first = opened.get_inputs()[0]
        batch = first.shape[0] if isinstance(first.shape[0], int) else None
        predict = partial(session.rows_apart if batch is None else session.rows, first.name)
        return ExportedNetwork(description, runtime, accelerator, predict, batch, apart)
    # In files of earlier exports the thresholds have defaults.
    named = [*opened.get_inputs(), *opened.get_overridable_initializers()]
    ranks = {value.name: len(value.shape) for value in named}
    return ExportedDetector(
        description, runtime, session.detect, ranks, "images" if "images" in ranks else "image", apart
    )


def _require(wanted: str, found: Sequence[str], path: Path) -> None:
    if wanted not in found:
        package = "onnxruntime-gpu in place of onnxruntime" if wanted.startswith("CUDA") else "an onnxruntime with it"
        raise MissingDevice(
            f"{path}: the device that was asked for needs {wanted}, but ONNX Runtime offers {', '.join(found)}. "
            f"Install {package}, or give --device cpu."
        )
