"""Checkpoint files: atomic writing and validated reading of `.pt` files.

A checkpoint is a dictionary as torch.save writes it; torch.load(weights_only=True) reads it too. last.pt and epochN.pt
have all of `KEYS`, and a run resumes from them bit for bit. best.pt has `WEIGHTS_KEYS` alone.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from tessera.utils.checkpoints.archive import ARCHIVE_ERRORS, read_archive, unreadable
from tessera.utils.checkpoints.foreign.yolov5 import find_module
from tessera.utils.checkpoints.restricted_unpickler import DamagedFile
from tessera.utils.checkpoints.schema import check_values
from tessera.utils.errors import UserError, did_you_mean
from tessera.utils.files import atomic_write, special_file_kind
from tessera.utils.text import shown

FORMAT = 1  # value of "version"; raised when older readers could not resume from the file

STATE_KEYS = (
    *("model", "ema", "ema_updates", "optimizer", "scaler"),
    *("epoch", "step", "step_in_epoch", "epoch_losses", "epoch_skipped", "skipped_steps", "class_maps"),
    *("best_fitness", "stopper", "rng"),
)
DESCRIPTION_KEYS = (
    *("config", "hyp", "model_yaml", "names", "stride", "imgsz", "anchors", "pixels", "dataset_hash"),
    *("version", "date", "tessera_version", "git"),
)
METRIC_KEYS = ("metrics", "thresholds")  # of the weights in this file; None if they were not validated
KEYS = STATE_KEYS + METRIC_KEYS + DESCRIPTION_KEYS
WEIGHTS_KEYS = ("ema", "epoch", *METRIC_KEYS, *DESCRIPTION_KEYS)
_STATE_ONLY_KEYS = set(KEYS) - set(WEIGHTS_KEYS)
_OPTIONAL_KEYS = ("imgsz", "pixels", "tessera_version", *METRIC_KEYS)  # None in files of versions that lack them


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically: after a kill or on a full disk, the previous file is intact.

    Missing directories are made. `state` has exactly the keys of `KEYS` or of `WEIGHTS_KEYS`.

    Raises:
        DamagedFile: a value that no reader would accept.
        UserError: the file cannot be written.
    """
    keys = set(KEYS if "optimizer" in state else WEIGHTS_KEYS)
    assert set(state) == keys, f"missing {keys - set(state)}, unknown {set(state) - keys}"
    check_values(state)
    with _replacing(path) as file:
        torch.save(dict(state), file)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a checkpoint, as atomic as `save_checkpoint` and much cheaper than writing the state again.

    No link: a write into one of the two files must not change the other.
    """
    with source.open("rb") as content, _replacing(target) as file:
        shutil.copyfileobj(content, file, 2**20)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` once it is complete; turn write errors into UserError."""
    try:
        with atomic_write(path) as file:
            yield file
    except (OSError, RuntimeError) as error:
        # torch's zip writer hides the OSError of a failed write behind its own RuntimeError.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        intact = " The previous one is intact." if path.exists() else ""
        remedy = "Free space" if reason.errno in (errno.ENOSPC, errno.EDQUOT) else "Make the directory writable"
        resumes = (path.parent / "last.pt").exists()
        action = "continue with --resume" if resumes else "start again, or give another --project"
        raise UserError(
            f"{path}: cannot write the checkpoint: {reason.strerror or reason}.{intact} {remedy}, then {action}."
        ) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a whole checkpoint; raise UserError for one with weights alone, from which no run resumes."""
    state = load_any_checkpoint(path)
    if "optimizer" not in state:
        last = path.with_name("last.pt")
        remedy = f"Resume from {last}" if last.is_file() and last != path else "Resume from the last.pt of its run"
        raise UserError(
            f"{path}: holds weights alone, as best.pt does, so no run can resume from it. {remedy}, or start a new run "
            "from these weights with --weights."
        )
    return state


def load_any_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of this program, whole or with weights alone; its tensors are on the CPU.

    Raises:
        UserError: no such file, a damaged or foreign file, values that no run writes, or a later format.
    """
    return checked_checkpoint(path, *read_content(path))


def read_content(path: Path) -> tuple[Any, int]:
    """Return the object in a file of this or another program, and the length of its pickle in bytes. No code runs.

    Raises:
        UserError: no such file, or it is damaged or hostile.
    """
    if kind := special_file_kind(path):
        raise UserError(f"{path}: found {kind}, expected a checkpoint file.")
    if not path.is_file():
        near = did_you_mean(path.name, (p.name for p in path.parent.glob("*.pt"))) if path.parent.is_dir() else ""
        raise UserError(f"{path}: no such checkpoint.{near} Expected a file such as runs/train/exp/weights/last.pt.")
    try:
        return read_archive(path)
    except ARCHIVE_ERRORS as error:
        raise unreadable(path, error) from error


def checked_checkpoint(path: Path, content: Any, most_parts: int) -> dict[str, Any]:
    """Return the content of a file as a checkpoint of this program; raise UserError if it is none.

    `most_parts` bounds the number of its values.
    """
    if find_module(content) is not None:
        raise UserError(
            f"{path}: not a checkpoint of this program: it holds pickled objects, as original YOLOv5 files do, so no "
            "run can resume from it. To start from its weights, give it as --weights."
        )
    if not isinstance(content, dict) or 2 * len(content.keys() & set(WEIGHTS_KEYS)) < len(WEIGHTS_KEYS):
        found = f"a {type(content).__name__}"
        if isinstance(content, dict):
            found = f"a dictionary with {', '.join(map(shown, [*content][:5])) or 'nothing'}"
        raise UserError(
            f"{path}: not a checkpoint of this program: found {found}. Expected a last.pt for --resume, or for "
            "--weights a best.pt or a file of YOLOX (nano to x), YOLOv9 (t, s, m, c) or YOLOv5."
        )
    version = content.get("version")
    if isinstance(version, int) and version > FORMAT:
        raise UserError(
            f"{path}: written by a later version of this program (format {version}; this one reads up to {FORMAT}). "
            "Update the program."
        )
    expected = WEIGHTS_KEYS if content.keys().isdisjoint(_STATE_ONLY_KEYS) else KEYS
    missing = [key for key in expected if key not in content and key not in _OPTIONAL_KEYS]
    if missing or not isinstance(version, int):
        raise UserError(
            f"{path}: incomplete: missing {', '.join(missing) or 'a version number'}. Use another checkpoint."
        )
    state = {**content, **{key: None for key in _OPTIONAL_KEYS if key not in content}}
    try:
        check_values(state, most_parts)
    except DamagedFile as error:
        raise UserError(f"{path}: damaged: {error}. Use another checkpoint.") from error
    return state
