"""Which kind of file `--weights` names, and the model in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tessera.utils.checkpoints.resolve import resolve_weights
from tessera.utils.checkpoints.weights import EXPORTED, load_weights, model_of_weights
from tessera.utils.errors import ConfigError, UserError, did_you_mean
from tessera.utils.flags.program import called
from tessera.utils.machine.accelerator import Accelerator, explain_out_of_memory_of
from tessera.utils.ranks.signals import signals_end_at_once
from tessera.utils.ranks.world import World
from tessera.utils.runtime.checkpoint import TorchNetwork
from tessera.utils.runtime.exported import ExportedDetector, ExportedNetwork, MissingDevice, errors_of
from tessera.utils.runtime.network_files import open_litert, open_ncnn, open_pt2, open_torchscript
from tessera.utils.runtime.onnxruntime import open_onnx
from tessera.utils.runtime.openvino import open_openvino

OpenModel = TorchNetwork | ExportedDetector | ExportedNetwork

PROGRAMS = {".torchscript", ".pt2"}  # to load one is to run what is in it
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
    """Open the file that `--weights` means. All ranks call it together: a checkpoint is read by rank 0 alone.

    Args:
        weights: a checkpoint, the bare name of an official one, or an exported file.
        world: this rank, whose accelerator computes.
        augment: test-time augmentation.
        half: the accelerator's 16 bits.
        end2end: the branch that needs no suppression.
        trust_file: an exported file that is a program may run.

    Raises:
        UserError: there is no such file, it cannot be read, or it cannot do what was asked for.
    """
    if is_exported(weights):
        for flag, given in (("--augment", augment), ("--half", half), ("--end2end", end2end)):
            if given:
                raise ConfigError(
                    f"{flag}: {weights} is an exported file, made one way or the other. Leave the flag out, or give "
                    "the checkpoint."
                )
        return open_exported(weights, world.accelerator, trust_file=trust_file)
    loaded = world.from_main(lambda: load_weights(resolve_weights(weights)))
    model = model_of_weights(loaded, weights)
    if model.channels != 3:
        raise UserError(f"--weights {weights}: reads images of {model.channels} channels, expected 3: images are RGB.")
    model.head.keep_inference(end2end=end2end)
    return TorchNetwork(model, loaded, world.accelerator, augment=augment, half=half)


def is_exported(name: str) -> bool:
    """Whether `--weights` names an exported file, not a checkpoint."""
    return Path(name).suffix.lower() in EXPORTED


def open_exported(
    name: str | Path, accelerator: Accelerator, *, trust_file: bool = False
) -> ExportedDetector | ExportedNetwork:
    """Open a file of export.py in the runtime that it is made for; it computes with as many threads as torch.

    A file that is a program is refused without `trust_file`, and nothing of it is read.

    Raises:
        UserError: there is no such file, it is damaged, it is a program that is not trusted, its runtime is missing or
            lacks the device, or another program made it.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        beside = [found.name for found in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(f"--weights {name}: no such file.{did_you_mean(path.name, beside)} Expected an exported file.")
    suffix = path.suffix.lower()
    if suffix in PROGRAMS and not trust_file:
        raise UserError(
            f"--weights {name}: a {suffix} file is a program; to load it can run anything with your rights. Give "
            "--trust-file (Python: trust_file=True) where you trust its maker; else take the checkpoint, or a file of "
            f"{called('export.py')} --include onnx, which holds no code."
        )
    if suffix in (".param", ".tflite") and not accelerator.is_host:
        raise MissingDevice(f"--weights {name}: computed on the CPU alone here. Give --device cpu.")
    with (
        errors_of(EXPORTED[suffix], path, "load"),
        explain_out_of_memory_of(path, accelerator),
        signals_end_at_once(),  # a runtime may never come back from a file
    ):
        return _OPENERS[suffix](path, accelerator)
