"""Opening of `--weights`: a checkpoint or an exported file of any format."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

from tessera.deploy.runtime.exported import ExportedDetector, ExportedNetwork, MissingDevice, runtime_errors
from tessera.deploy.runtime.network_readers import open_litert, open_ncnn, open_pt2, open_torchscript
from tessera.deploy.runtime.onnxruntime import open_onnx
from tessera.deploy.runtime.openvino import open_openvino
from tessera.utils.checkpoints.weights import EXPORTED, load_weights, model_of_weights, resolve_weights
from tessera.utils.errors import ConfigError, UserError, did_you_mean
from tessera.utils.evaluation.networks import TorchNetwork
from tessera.utils.files import reachable_path
from tessera.utils.flags.program import called
from tessera.utils.machine.accelerator import Accelerator, explain_out_of_memory_loading
from tessera.utils.machine.host import capture_library_output
from tessera.utils.ranks.world import World

OpenModel = TorchNetwork | ExportedDetector | ExportedNetwork

PROGRAMS = {".torchscript", ".pt2"}  # loading one runs its code
_LOADING = threading.Lock()  # what is captured belongs to the whole process
_NOTHING = re.compile(b"(?!)")  # no line of a library is expected
_OPENERS: dict[str, Callable[[Path, Accelerator], ExportedDetector | ExportedNetwork]] = {
    ".onnx": open_onnx,
    ".xml": open_openvino,
    ".torchscript": open_torchscript,
    ".pt2": open_pt2,
    ".param": open_ncnn,
    ".tflite": open_litert,
}


def open_model(
    weights: str,
    world: World,
    *,
    augment: bool = False,
    half: bool = False,
    end2end: bool = False,
    trust_file: bool = False,
) -> OpenModel:
    """Open the file of `--weights`; all ranks call it together, and rank 0 reads a checkpoint.

    `weights` is a checkpoint, the name of a published one, or an exported file. `augment` is test-time augmentation,
    `half` 16-bit inference, `end2end` the branch without NMS; `trust_file` allows files that are programs.

    Raises:
        UserError: the file is missing or unreadable, or does not support a flag.
    """
    if is_exported(weights):
        for flag, given in (("--augment", augment), ("--half", half), ("--end2end", end2end)):
            if given:
                raise ConfigError(
                    f"{flag}: {weights} is an exported file, which the flag does not change. Remove the flag, or give "
                    "the checkpoint."
                )
        return open_exported(weights, world.accelerator, trust_file=trust_file)
    loaded = world.run_on_main(lambda: load_weights(resolve_weights(weights)))
    model = model_of_weights(loaded, weights)
    if model.channels != 3:
        raise UserError(f"--weights {weights}: reads images of {model.channels} channels, expected 3: images are RGB.")
    model.head.strip_for_inference(end2end=end2end)
    return TorchNetwork(model, loaded, world.accelerator, augment=augment, half=half)


def is_exported(name: str) -> bool:
    """Return whether `--weights` names an exported file, not a checkpoint."""
    return Path(name).suffix.lower() in EXPORTED


def open_exported(
    name: str | Path, accelerator: Accelerator, *, trust_file: bool = False
) -> ExportedDetector | ExportedNetwork:
    """Open an exported file in its runtime, with as many threads as torch.

    A program is refused without `trust_file`, before anything of it is read.

    Raises:
        UserError: the file is missing, damaged, another program's, or a program that is not trusted; or its runtime or
            device is missing.
    """
    path = reachable_path(name, "--weights")
    if not path.is_file():
        beside = [found.name for found in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(f"--weights {name}: no such file.{did_you_mean(path.name, beside)} Expected an exported file.")
    suffix = path.suffix.lower()
    if suffix in PROGRAMS and not trust_file:
        raise UserError(
            f"--weights {name}: a {suffix} file is a program; loading it can run anything with your rights. Give "
            "--trust-file (Python: trust_file=True) if you trust its author, else use the checkpoint or a file of "
            f"{called('export.py')} --include onnx, which holds no code."
        )
    if suffix in (".param", ".tflite") and not accelerator.is_host:
        raise MissingDevice(f"--weights {name}: this format runs on the CPU only. Give --device cpu.")
    with (
        _LOADING,
        runtime_errors(EXPORTED[suffix], path, "load"),
        explain_out_of_memory_loading(path, accelerator),
        capture_library_output(_NOTHING),
    ):
        return _OPENERS[suffix](path, accelerator)
