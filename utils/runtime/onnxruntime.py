"""ONNX files, by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.extras import import_extra
from tessera.utils.runtime.exported import Description, ExportedDetector, ExportedNetwork, MissingDevice

_QUIET = 3  # errors alone


class OnnxNetwork(ExportedNetwork):
    """The bare network."""

    def __init__(self, description: Description, accelerator: Accelerator, session: Any) -> None:
        super().__init__(description, accelerator, _runtime(session))
        self._session = session
        (self._input,) = (value.name for value in session.get_inputs())
        first = session.get_inputs()[0].shape[0]
        self.batch = first if isinstance(first, int) else None

    def predict(self, images: NDArray[np.float32]) -> NDArray[Any]:
        """As ExportedNetwork."""
        return np.asarray(self._session.run(None, {self._input: images})[0])


class OnnxDetector(ExportedDetector):
    """The whole pipeline; the thresholds have defaults in files of earlier exports."""

    def __init__(self, description: Description, session: Any) -> None:
        inputs = [*session.get_inputs(), *session.get_overridable_initializers()]
        ranks = {value.name: len(value.shape) for value in inputs}
        self._batched = "images" in ranks  # pictures of one size: here one at a time
        super().__init__(description, _runtime(session), ranks, "images" if self._batched else "image")
        self._session = session

    def run(self, picture: NDArray[np.uint8], thresholds: Mapping[str, NDArray[Any]]) -> tuple[NDArray[Any], ...]:
        """As ExportedDetector."""
        if not self._batched:
            return tuple(self._session.run(["boxes", "scores", "classes"], {"image": picture, **thresholds}))
        boxes, scores, classes, counts = self._session.run(
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
    options = runtime.SessionOptions()
    options.log_severity_level = _QUIET
    options.intra_op_num_threads = torch.get_num_threads()
    # Between two pictures its threads would keep the cores busy that decoding, suppression and other processes need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = runtime.InferenceSession(str(path), options, providers=list(providers))
    if wanted not in session.get_providers():
        raise _unavailable(path, wanted, session.get_providers())
    strings = dict(session.get_modelmeta().custom_metadata_map)
    inputs = "; ".join(f"{value.name} {value.type} {value.shape}" for value in session.get_inputs())
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
