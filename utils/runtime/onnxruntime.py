"""ONNX files, by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.extras import import_extra
from tessera.utils.runtime.exported import Description, ExportedDetector, ExportedNetwork, MissingDevice

_QUIET = 3  # errors alone
_MOST_AT_ONCE = 8  # pictures, each of which needs memory of its own


class _Session:
    """A file in ONNX Runtime.

    Args:
        open_with: opens it with so many threads a run.
        is_host: it computes on the CPU.
    """

    def __init__(self, open_with: Callable[[int], Any], is_host: bool) -> None:
        self._open_with, self._threads = open_with, torch.get_num_threads() if is_host else 1
        self._opened = open_with(self._threads)
        self._pool: ThreadPoolExecutor | None = None

    @property
    def opened(self) -> Any:
        """The `InferenceSession`."""
        return self._opened

    def compute_apart(self) -> int:
        """As Model: a network this small computes a picture on one thread in little more time than on two."""
        at_once = min(self._threads, _MOST_AT_ONCE)
        if at_once > 1 and self._pool is None:
            self._opened = self._open_with(self._threads // at_once)
            self._pool = ThreadPoolExecutor(at_once, "ONNX Runtime")
        return at_once

    def each(self, run: Callable[[NDArray[Any]], NDArray[Any]], images: NDArray[Any]) -> NDArray[Any]:
        """What `run` gives for the images, joined: at once, or where pictures are computed apart one by one."""
        if self._pool is None or len(images) == 1:
            return run(images)
        return np.concatenate([*self._pool.map(run, np.split(images, len(images)))])


class OnnxNetwork(ExportedNetwork):
    """The bare network."""

    def __init__(self, description: Description, accelerator: Accelerator, session: _Session) -> None:
        super().__init__(description, accelerator, _runtime(session.opened))
        self._session = session
        (first,) = session.opened.get_inputs()
        self._input = first.name
        self.batch = first.shape[0] if isinstance(first.shape[0], int) else None

    def compute_apart(self) -> int:
        """As Model."""
        return self._session.compute_apart()

    def predict(self, images: NDArray[np.float32]) -> NDArray[Any]:
        """As ExportedNetwork."""
        return self._session.each(self._run, images) if self.batch is None else self._run(images)

    def _run(self, images: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(self._session.opened.run(None, {self._input: images})[0])


class OnnxDetector(ExportedDetector):
    """The whole pipeline; the thresholds have defaults in files of earlier exports."""

    def __init__(self, description: Description, session: _Session) -> None:
        inputs = [*session.opened.get_inputs(), *session.opened.get_overridable_initializers()]
        ranks = {value.name: len(value.shape) for value in inputs}
        self._batched = "images" in ranks  # pictures of one size: here one at a time
        super().__init__(description, _runtime(session.opened), ranks, "images" if self._batched else "image")
        self._session = session

    def compute_apart(self) -> int:
        """As Model."""
        return self._session.compute_apart()

    def run(self, picture: NDArray[np.uint8], thresholds: Mapping[str, NDArray[Any]]) -> tuple[NDArray[Any], ...]:
        """As ExportedDetector."""
        session = self._session.opened
        if not self._batched:
            return tuple(session.run(["boxes", "scores", "classes"], {"image": picture, **thresholds}))
        boxes, scores, classes, counts = session.run(
            ["boxes", "scores", "classes", "counts"], {"images": picture[None], **thresholds}
        )
        return tuple(part[0, : counts[0]] for part in (boxes, scores, classes))


def open_onnx(path: Path, accelerator: Accelerator) -> OnnxNetwork | OnnxDetector:
    """Open an ONNX file of export.py.

    Args:
        path: of the file.
        accelerator: what it must be computed on.

    Raises:
        UserError: ONNX Runtime is missing or lacks the provider; or another program made the file.
        Exception: of a class for each of the runtime's codes: the file is damaged.
    """
    runtime = import_extra("onnxruntime", "export", str(path))
    providers = accelerator.onnx_providers
    wanted = providers[0]
    if wanted not in runtime.get_available_providers():
        raise _unavailable(path, wanted, runtime.get_available_providers())

    def open_with(threads: int) -> Any:
        options = runtime.SessionOptions()
        options.log_severity_level = _QUIET
        options.intra_op_num_threads = threads
        # Between two pictures its threads would keep the cores busy that decoding, suppression and others need.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return runtime.InferenceSession(str(path), options, providers=list(providers))

    session = _Session(open_with, accelerator.is_host)
    if wanted not in session.opened.get_providers():
        raise _unavailable(path, wanted, session.opened.get_providers())
    strings = dict(session.opened.get_modelmeta().custom_metadata_map)
    inputs = "; ".join(f"{value.name} {value.type} {value.shape}" for value in session.opened.get_inputs())
    description = Description.read(strings, path, f"its inputs: {inputs}")
    if description.whole:
        return OnnxDetector(description, session)
    return OnnxNetwork(description, accelerator, session)


def _unavailable(path: Path, wanted: str, found: Sequence[str]) -> MissingDevice:
    package = "onnxruntime-gpu in place of onnxruntime" if wanted.startswith("CUDA") else "an onnxruntime that has it"
    return MissingDevice(
        f"{path}: the device that was asked for needs {wanted}, but ONNX Runtime offers {', '.join(found)}. Install "
        f"{package}, or give --device cpu."
    )


def _runtime(session: Any) -> str:
    return f"ONNX Runtime, {session.get_providers()[0]}"
