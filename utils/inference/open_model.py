"""Which kind of file `--weights` is, and the model in it."""

from __future__ import annotations

from tessera.utils.checkpoints.resolve import resolve_weights
from tessera.utils.errors import ConfigError
from tessera.utils.inference.backend import Backend, PictureBackend
from tessera.utils.inference.backends.choose import is_exported, open_exported
from tessera.utils.inference.network import TorchNetwork
from tessera.utils.machine.accelerator import Accelerator


def open_model(
    weights: str,
    accelerator: Accelerator,
    *,
    augment: bool = False,
    half: bool = False,
    end2end: bool = False,
    trust_file: bool = False,
) -> Backend | PictureBackend:
    """Open the file that `--weights` means.

    Args:
        weights: a checkpoint, the bare name of an official one, or an exported file.
        accelerator: where it computes.
        augment: test-time augmentation.
        half: the accelerator's 16 bits.
        end2end: the branch that needs no suppression.
        trust_file: an exported file that is a program may run.

    Raises:
        UserError: there is no such file, it cannot be read, or it cannot do what was asked for.
    """
    if not is_exported(weights):
        return TorchNetwork.open(resolve_weights(weights), accelerator, augment=augment, half=half, end2end=end2end)
    for flag, given in (("--augment", augment), ("--half", half), ("--end2end", end2end)):
        if given:
            raise ConfigError(f"{flag} with {weights}: what an exported file computes was decided by its export.")
    return open_exported(weights, accelerator, trust_file=trust_file)
