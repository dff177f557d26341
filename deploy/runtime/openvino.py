"""Reader of OpenVINO files: .xml with its weights, .bin, beside it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.deploy.runtime.exported import Description, ExportedDetector, ExportedNetwork, MissingDevice
from tessera.utils.errors import UserError
from tessera.utils.files import open_plain
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.optional_packages import import_extra

PRECISION = "f32"  # OpenVINO's default is bfloat16 on some processors, with other boxes
_LONGEST = 1 << 28  # bytes of an .xml, without weights
SECTION = "tessera"  # section of the model's rt_info with the metadata
# The binding builds its type tables in the first call that needs them and may release the GIL meanwhile: two threads in
# their first call could deadlock.
_FIRST_CALL = threading.Lock()


def open_openvino(path: Path, accelerator: Accelerator) -> ExportedNetwork | ExportedDetector:
    """Open an OpenVINO file.

    Raises:
        UserError: OpenVINO, its device or the .bin is missing, or the file is another program's.
        RuntimeError: the file is damaged.
    """
    openvino = import_extra("openvino", "openvino", str(path))
    with _FIRST_CALL:  # from NumPy's types to OpenVINO's, and back
        np.array(openvino.Tensor(np.zeros(1, np.float32), shared_memory=True).data)
    core, device = openvino.Core(), accelerator.openvino_device
    if device not in core.available_devices:
        raise MissingDevice(
            f"{path}: OpenVINO has {', '.join(core.available_devices)} here, not the requested device. Give "
            "--device cpu."
        )
    if not path.with_suffix(".bin").is_file():
        raise UserError(f"{path}: its weights, {path.with_suffix('.bin').name}, are not beside it. Copy both files.")
    with open_plain(path, _LONGEST) as file:
        start = file.read(1 << 12)
    if b"<net" not in start:  # OpenVINO would try each reader that it has, which takes minutes
        raise UserError(f"{path}: found no <net> at its start, expected an OpenVINO file. Export it again.")
    model = core.read_model(path)
    compiled = core.compile_model(
        model, device, {"INFERENCE_PRECISION_HINT": PRECISION, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    )
    own = threading.local()  # a request serves one thread at a time

    def compute(inputs: dict[str, Any]) -> dict[str, NDArray[Any]]:
        if not hasattr(own, "request"):
            own.request = compiled.create_infer_request()
        found = own.request.infer(inputs, share_inputs=True)
        return {output.get_any_name(): np.array(value) for output, value in found.items()}

    def detect(inputs: dict[str, Any]) -> list[NDArray[Any]]:
        found = compute(inputs)
        return [found[name] for name in ("boxes", "scores", "classes")]

    found = model.get_rt_info([SECTION]).value if model.has_rt_info([SECTION]) else {}  # {}: another program's
    strings = {str(key): str(getattr(value, "value", value)) for key, value in found.items()}
    description = Description.read(strings, path)
    devices = compiled.get_property("EXECUTION_DEVICES")
    runtime = f"OpenVINO, {', '.join(devices) if isinstance(devices, list) else devices}"
    if description.whole:
        ranks = {value.get_any_name(): len(value.get_partial_shape()) for value in compiled.inputs}
        return ExportedDetector(description, runtime, detect, ranks)
    taken, given = compiled.input(0).get_any_name(), compiled.output(0).get_any_name()
    first = compiled.input(0).get_partial_shape()[0]
    batch = None if first.is_dynamic else first.get_length()
    return ExportedNetwork(description, runtime, accelerator, lambda images: compute({taken: images})[given], batch)
