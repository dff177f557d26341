"""Checkpoint files: tensors and plain values, written whole or not at all, from which a run resumes bit for bit.

A `.pt` is what torch.save makes of one dictionary, which torch.load(weights_only=True) takes. With the keys of `KEYS`
it is whole, as last.pt and epochN.pt, and a run resumes from it; best.pt has those of `WEIGHTS_KEYS` alone.
Here archive.py reads it: no file can run code, nor ask for more memory than its own size.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from tessera.utils.checkpoints.archive import ARCHIVE_ERRORS, Archive, unreadable
from tessera.utils.checkpoints.foreign.yolov5 import find_module
from tessera.utils.checkpoints.restricted_unpickler import Damaged
from tessera.utils.checkpoints.schema import check_values
from tessera.utils.errors import UserError, did_you_mean
from tessera.utils.files import atomic_write, special_kind
from tessera.utils.text import shown

FORMAT = 1  # the key "version"; raised when a reader of the older format could not resume from the newer one

STATE_KEYS = (
    *("model", "ema", "ema_updates", "optimizer", "scaler"),
    *("epoch", "step", "step_in_epoch", "epoch_losses", "epoch_skipped", "skipped_steps", "class_maps"),
    *("best_fitness", "stopper", "rng"),
)
DESCRIPTION_KEYS = (
    *("config", "hyp", "model_yaml", "names", "stride", "imgsz", "anchors", "pixels", "dataset_hash"),
    *("version", "date", "tessera_version", "git"),
)
MEASURED_KEYS = ("metrics", "thresholds")  # of the very weights in the file; None where they were not validated
KEYS = STATE_KEYS + MEASURED_KEYS + DESCRIPTION_KEYS
WEIGHTS_KEYS = ("ema", "epoch", *MEASURED_KEYS, *DESCRIPTION_KEYS)
_RESUMED = set(KEYS) - set(WEIGHTS_KEYS)
_ADDED = ("imgsz", "pixels", "tessera_version", *MEASURED_KEYS)  # older files lack them: None


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint. Whatever happens on the way, a kill or a full disk included, `path` stays the previous one.

    Args:
        path: such as weights/last.pt; its folder is made.
        state: exactly the keys of `KEYS`, or of `WEIGHTS_KEYS`; tensors and plain values only.

    Raises:
        Damaged: a value that no reader would take.
        UserError: the file cannot be written; with the reason and what is free.
    """
    keys = set(KEYS if "optimizer" in state else WEIGHTS_KEYS)
    assert set(state) == keys, f"missing {keys - set(state)}, unknown {set(state) - keys}"
    check_values(state)
    with _replacing(path) as file:
        torch.save(dict(state), file)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a checkpoint, with the guarantees of `save_checkpoint`; much cheaper than to write the state once more.

    Not a link: writing into one of the two files must not change the other.
    """
    with source.open("rb") as content, _replacing(target) as file:
        shutil.copyfileobj(content, file, 2**20)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of the checkpoint `path` once it is whole; a user learns why it cannot."""
    try:
        with atomic_write(path) as file:
            yield file
    except (OSError, RuntimeError) as error:
        # torch's zip writer answers a failing write with a RuntimeError of its own, over the one that says why.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise UserError(_unwritable(path, reason)) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """As `load_any_checkpoint`, but a file of weights alone, from which no run resumes, is an error too."""
    state = load_any_checkpoint(path)
    if "optimizer" not in state:
        last = path.with_name("last.pt")
        remedy = f"Resume from {last}" if last.is_file() and last != path else "Resume from the last.pt of its run"
        raise UserError(
            f"{path}: holds weights alone, as best.pt does: no run resumes from it. {remedy}, or start a new run from "
            "these weights with --weights."
        )
    return state


def load_any_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, whole or weights alone; its tensors are on the CPU.

    Raises:
        UserError: no such file, damaged, with other values than a run writes, an original YOLOv5 file, something else,
            or of a later version.
    """
    if kind := special_kind(path):
        raise UserError(f"{path}: found {kind}, expected a checkpoint file.")
    if not path.is_file():
        near = did_you_mean(path.name, (p.name for p in path.parent.glob("*.pt"))) if path.parent.is_dir() else ""
        raise UserError(f"{path}: no such checkpoint.{near} Expected a file such as last.pt in a run's folder weights.")
    try:
        with Archive.open(path) as archive:
            state = archive.content()
    except ARCHIVE_ERRORS as error:
        raise unreadable(path, error) from error
    if find_module(state) is not None:
        raise UserError(
            f"{path}: not a checkpoint of this program, from which a run could be resumed: it holds pickled objects, "
            f"as an original YOLOv5 file does. To start from its weights, give it as --weights."
        )
    if not isinstance(state, dict) or 2 * len(state.keys() & set(WEIGHTS_KEYS)) < len(WEIGHTS_KEYS):
        found = f"a {type(state).__name__}"
        if isinstance(state, dict):
            found = f"a dictionary with {', '.join(map(shown, [*state][:5])) or 'nothing'}"
        raise UserError(
            f"{path}: not a checkpoint of this program: found {found}. Expected a last.pt to --resume, or for "
            f"--weights a best.pt or a file of YOLOX, YOLOv9 or YOLOv5."
        )
    version = state.get("version")
    if isinstance(version, int) and version > FORMAT:
        raise UserError(
            f"{path}: written by a later version of this program (format {version}; this one reads up to {FORMAT}). "
            f"Update the program."
        )
    expected = WEIGHTS_KEYS if state.keys().isdisjoint(_RESUMED) else KEYS
    missing = [key for key in expected if key not in state and key not in _ADDED]
    if missing or not isinstance(version, int):
        raise UserError(
            f"{path}: incomplete, without {', '.join(missing) or 'a version number'}. Take another checkpoint."
        )
    state = {**state, **{key: None for key in _ADDED if key not in state}}
    try:
        check_values(state, len(archive.pickled))
    except Damaged as error:
        raise UserError(f"{path}: damaged: {error}. Take another checkpoint.") from error
    return state


def _unwritable(path: Path, reason: OSError) -> str:
    text = f"{path}: cannot write the checkpoint: {reason.strerror or reason}."
    if path.exists():
        text += " The previous one is whole and stays."
    if reason.errno in (errno.ENOSPC, errno.EDQUOT) and path.parent.is_dir():
        free = shutil.disk_usage(path.parent).free / 2**20
        text += f" The disk has {free:.0f} MiB free, which is too little for it. Make room"
    else:
        text += " Make the folder writable"
    if (path.parent / "last.pt").exists():
        return f"{text}, and continue with --resume."
    return f"{text}, or give another --project, and start again."
