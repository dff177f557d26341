"""Reader of ONNX files, with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.deploy.runtime.exported import Description, ExportedDetector, ExportedNetwork, MissingDevice
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.host import MOST_AT_ONCE
from tessera.utils.machine.optional_packages import import_extra


class _Session:
    """A file in ONNX Runtime; `open_with` opens an `InferenceSession` with a number of threads per run."""

    def __init__(self, open_with: Callable[[int], Any], is_host: bool) -> None:
        self._open_with, self._threads = open_with, torch.get_num_threads() if is_host else 1
        self.opened = open_with(self._threads)
        self._pool: ThreadPoolExecutor | None = None

    def enable_concurrency(self) -> int:
        """As Model: small networks are hardly faster on two threads than on one."""
        at_once = min(self._threads, MOST_AT_ONCE)
        if at_once > 1 and self._pool is None:
            self.opened = self._open_with(self._threads // at_once)
            self._pool = ThreadPoolExecutor(at_once, "ONNX Runtime")
        return at_once

    def rows(self, name: str, images: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(self.opened.run(None, {name: images})[0])

    def rows_concurrently(self, name: str, images: NDArray[Any]) -> NDArray[Any]:
        """Return the rows, image by image after `enable_concurrency`."""
        if self._pool is None or len(images) == 1:
            return self.rows(name, images)
        return np.concatenate([*self._pool.map(partial(self.rows, name), np.split(images, len(images)))])

    def detect(self, inputs: dict[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        """Return boxes, scores and classes of an image; the file may take a batch."""
        if "images" not in inputs:
            found: Sequence[NDArray[Any]] = self.opened.run(["boxes", "scores", "classes"], inputs)
            return found
        inputs["images"] = inputs["images"][None]
        *found, counts = self.opened.run(["boxes", "scores", "classes", "counts"], inputs)
        return [part[0, : counts[0]] for part in found]


def open_onnx(path: Path, accelerator: Accelerator) -> ExportedNetwork | ExportedDetector:
    """Open an ONNX file.

    Raises:
        UserError: ONNX Runtime or its provider is missing, or the file is another program's.
        Exception: the file is damaged; the runtime has a class for each of its codes.
    """
    library = import_extra("onnxruntime", "export", str(path))
    library.set_default_logger_severity(4)
    providers = accelerator.onnx_providers
    _require(providers[0], library.get_available_providers(), path)

    def open_with(threads: int) -> Any:
        options = library.SessionOptions()
        options.log_severity_level = 4  # its log has names of the file raw; its exceptions say the same
        options.intra_op_num_threads = threads
        # Spinning threads would occupy the cores that decoding and NMS need between two images.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        by_provider = [accelerator.onnx_options, *({} for _ in providers[1:])]
        return library.InferenceSession(str(path), options, providers=list(providers), provider_options=by_provider)

    session = _Session(open_with, accelerator.is_host)
    opened = session.opened
    _require(providers[0], opened.get_providers(), path)
    inputs = "; ".join(f"{value.name} {value.type} {value.shape}" for value in opened.get_inputs())
    strings = dict(opened.get_modelmeta().custom_metadata_map)
    description = Description.read(strings, path, f"its inputs: {inputs}")
    runtime, concurrency = f"ONNX Runtime, {opened.get_providers()[0]}", session.enable_concurrency
    if not description.whole:
        first = opened.get_inputs()[0]
        batch = first.shape[0] if isinstance(first.shape[0], int) else None
        predict = partial(session.rows_concurrently if batch is None else session.rows, first.name)
        return ExportedNetwork(description, runtime, accelerator, predict, batch, concurrency)
    # Files of earlier exports have defaults for the thresholds.
    named = [*opened.get_inputs(), *opened.get_overridable_initializers()]
    ranks = {value.name: len(value.shape) for value in named}
    return ExportedDetector(
        description, runtime, session.detect, ranks, "images" if "images" in ranks else "image", concurrency
    )


def _require(wanted: str, found: Sequence[str], path: Path) -> None:
    if wanted not in found:
        package = "onnxruntime-gpu in place of onnxruntime" if wanted.startswith("CUDA") else "an onnxruntime with it"
        raise MissingDevice(
            f"{path}: the requested device needs {wanted}, but ONNX Runtime has {', '.join(found)}. Install {package}, "
            "or give --device cpu."
        )
