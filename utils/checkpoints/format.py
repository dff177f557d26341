"""Checkpoint files: their keys, atomic writing and validated reading.

A checkpoint is a dictionary as torch.save writes it; torch.load(weights_only=True) reads it too. last.pt and epochN.pt
have all of `KEYS`, and a run resumes from them bit for bit. best.pt has `WEIGHTS_KEYS` alone.
"""

from __future__ import annotations

import errno
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.data.labels.classes import LONGEST_CLASS_NAME
from tessera.models.detector import DetectionModel
from tessera.utils.bit_depth import PixelRule
from tessera.utils.checkpoints.archive import ARCHIVE_ERRORS, DamagedFile, pickled_module, read_archive
from tessera.utils.errors import UserError, did_you_mean
from tessera.utils.files import atomic_write, special_file_kind
from tessera.utils.flags.version import __version__
from tessera.utils.image_size import ImageSize, size_hw_of
from tessera.utils.text import first_line, first_of, plural, shown
from tessera.utils.types import Metrics

FORMAT = 1  # value of "version"; raised when older readers could not resume from the file
MIN_IMGSZ, MAX_IMGSZ = 32, 8192  # as of --imgsz
_DEEPEST = 20  # nested values
_OLD_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # first bytes of files of torch before 1.6

_Test = Callable[[Any], bool]


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, str) or _is_number(value)


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_size(value: Any) -> bool:
    return _is_count(value) or (_items(_is_count)(value) and len(value) == 2)


def _is_instance(kind: type) -> _Test:
    return lambda value: isinstance(value, kind)


def _optional(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _items(test: _Test) -> _Test:
    return lambda value: isinstance(value, (list, tuple)) and all(map(test, value))


def _table(test: _Test = lambda value: True) -> _Test:
    return lambda value: isinstance(value, dict) and all(isinstance(k, str) and test(x) for k, x in value.items())


def _is_stopper(value: Any) -> bool:
    epochs = ("best_epoch", "improved_epoch")  # the second is missing in earlier versions; -1 = initial weights
    return (
        _table(_is_number)(value)
        and {"best_fitness", "best_epoch"} <= value.keys()
        and all(_is_count(value[key], -1) for key in epochs if key in value)
    )


def _is_thresholds(value: Any) -> bool:
    return (
        _table()(value) and _is_number(value.get("confidence")) and _items(_is_number)(value.get("class_confidences"))
    )


_COUNT = "a whole number", _is_count
_TENSORS = "tensors by name", _table(_is_instance(Tensor))
_VALUES = "values by name", _table()
_TEXT = "text", _is_instance(str)
# Words for the value of each key, and a test of it. What the words leave open is checked where the value is used.
_STATE: dict[str, tuple[str, _Test]] = {
    "model": _TENSORS,
    "ema": _TENSORS,
    "ema_updates": _COUNT,
    "optimizer": _VALUES,
    "scaler": ("numbers by name", _table(_is_number)),
    **dict.fromkeys(("epoch", "step", "step_in_epoch"), _COUNT),
    "epoch_losses": ("a tensor", _is_instance(Tensor)),
    **dict.fromkeys(("epoch_skipped", "skipped_steps"), _COUNT),
    "class_maps": ("a list of numbers", _items(_is_number)),
    "best_fitness": ("a number", _is_number),
    "stopper": ("the best epoch", _is_stopper),
    "rng": _VALUES,
}
_METRICS: dict[str, tuple[str, _Test]] = {  # of the weights in this file; None if they were not validated
    "metrics": ("numbers by name, or nothing", _optional(_table(_is_number))),
    "thresholds": ("confidences, or nothing", _optional(_is_thresholds)),
}
_DESCRIPTION: dict[str, tuple[str, _Test]] = {
    "config": _VALUES,
    "hyp": _VALUES,
    "model_yaml": _VALUES,
    "names": ("a list of text", _items(_is_instance(str))),
    "stride": ("a list of numbers", _items(_is_number)),
    "imgsz": ("one or two whole numbers, or nothing", _optional(_is_size)),
    "anchors": ("a tensor, or nothing", _optional(_is_instance(Tensor))),
    "pixels": ("two limits of levels, or nothing", _optional(_table(_items(_is_number)))),
    "dataset_hash": _TEXT,
    "version": ("a version number", _is_count),
    "date": _TEXT,
    **dict.fromkeys(("tessera_version", "git"), ("text, or nothing", _optional(_is_instance(str)))),
}
_KINDS = {**_STATE, **_METRICS, **_DESCRIPTION}
KEYS = tuple(_KINDS)
WEIGHTS_KEYS = ("ema", "epoch", *_METRICS, *_DESCRIPTION)
_OPTIONAL_KEYS = ("imgsz", "pixels", "tessera_version", *_METRICS)  # None in files of versions that lack them


def describe_run(
    model: DetectionModel,
    config: Mapping[str, Any],
    hyp: Mapping[str, Any],
    imgsz: ImageSize,
    dataset_hash: str,
    git: str | None = None,
    pixels: PixelRule | None = None,
) -> dict[str, Any]:
    """Return the description of a run for a checkpoint of a raw model; `date` is now, in UTC.

    `config` and `hyp` hold plain values; `git` comes from `git_revision`.
    """
    return {
        "config": dict(config),
        "hyp": dict(hyp),
        "model_yaml": model.yaml,
        "names": list(model.names),
        "stride": list(model.head.strides),
        "imgsz": imgsz if isinstance(imgsz, int) else list(imgsz),
        "anchors": model.head.priors,
        "pixels": None if pixels is None else pixels.as_dict(),
        "dataset_hash": dataset_hash,
        "version": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "tessera_version": __version__,
        "git": git,
    }


def describe_metrics(metrics: Metrics | None) -> dict[str, Any]:
    """Return metrics and the confidences with the best F1 for a checkpoint; None if its weights were not validated."""
    if metrics is None:
        return {"metrics": None, "thresholds": None}
    thresholds = {"confidence": metrics.confidence, "class_confidences": metrics.class_confidences.tolist()}
    names = ("precision", "recall", "map50", "map", "fitness", "images", "objects")
    return {
        "metrics": {name: getattr(metrics, name) for name in names},
        "thresholds": thresholds if metrics.objects else None,
    }


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
    try:
        with atomic_write(path) as file:
            torch.save(dict(state), file)
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
    state = checked_checkpoint(path, *read_content(path, resumes=True), resumes=True)
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


def read_content(path: Path, *, resumes: bool = False) -> tuple[Any, int]:
    """Return the object in a file of this or another program, and the length of its pickle in bytes. No code runs.

    Raises:
        UserError: no such file, or it is damaged or hostile; with `resumes` it offers files to resume from.
    """
    if kind := special_file_kind(path):
        raise UserError(f"{path}: found {kind}, expected a checkpoint file.")
    if not path.is_file():
        near = did_you_mean(path.name, (p.name for p in path.parent.glob("*.pt"))) if path.parent.is_dir() else ""
        raise UserError(f"{path}: no such checkpoint.{near} Expected a file such as runs/train/exp/weights/last.pt.")
    try:
        return read_archive(path)
    except ARCHIVE_ERRORS as error:
        raise UserError(
            f"{path}: damaged, or not a checkpoint: found {_what_is_there(path, error)}. {_another(path, resumes)}"
        ) from error


def _what_is_there(path: Path, error: BaseException) -> str:
    """Describe a file whose reading raised one of ARCHIVE_ERRORS."""
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as refused:
        raise UserError(f"{path}: cannot be read ({refused.strerror}). Check its permissions and the disk.") from error
    if not start:
        return "an empty file"
    if start.startswith(b"PK"):
        reason = first_line(error)
        return f"a truncated checkpoint of {path.stat().st_size:,} bytes" if "not a zip file" in reason else reason
    if start.startswith(_OLD_TORCH):
        return "the format of torch before 1.6, to be saved again with a later version"
    text = " ".join(start.decode("utf-8", "surrogateescape").split())
    return f"text: {shown(text, 40)}" if text.isprintable() else "no zip archive"


def _another(path: Path, resumes: bool) -> str:
    """Return the remedy for a damaged file: another one, from which a run can resume if it `resumes`."""
    others = sorted(other.name for other in path.parent.glob("*.pt") if other != path)
    if resumes:
        best = path.with_name("best.pt")
        others = [name for name in others if name != best.name]
        if not others and best.is_file() and best != path:
            return f"Copy the file again, or start a new run from {best} with --weights."
    beside = f", such as {first_of(others, 3)} in the same directory," if others else ""
    return f"Use another checkpoint{beside} or copy the file again."


def is_own(content: Any) -> bool:
    """Return whether the content of a file is a checkpoint of this program, perhaps an incomplete one."""
    return isinstance(content, dict) and 2 * len(content.keys() & set(WEIGHTS_KEYS)) >= len(WEIGHTS_KEYS)


def checked_checkpoint(path: Path, content: Any, most_parts: int, *, resumes: bool = False) -> dict[str, Any]:
    """Return the content of a file as a checkpoint of this program; raise UserError if it is none.

    `most_parts` bounds the number of its values.
    """
    if pickled_module(content) is not None:
        raise UserError(
            f"{path}: not a checkpoint of this program: it holds pickled objects, as original YOLOv5 files do, so no "
            "run can resume from it. To start from its weights, give it as --weights."
        )
    if not is_own(content):
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
    expected = WEIGHTS_KEYS if content.keys().isdisjoint(_STATE.keys() - {"ema", "epoch"}) else KEYS
    missing = [key for key in expected if key not in content and key not in _OPTIONAL_KEYS]
    if missing or not isinstance(version, int):
        raise UserError(
            f"{path}: incomplete: missing {', '.join(missing) or 'a version number'}. {_another(path, resumes)}"
        )
    state = {**content, **{key: None for key in _OPTIONAL_KEYS if key not in content}}
    try:
        check_values(state, most_parts)
    except DamagedFile as error:
        raise UserError(f"{path}: damaged: {error}. {_another(path, resumes)}") from error
    return state


def check_values(state: Mapping[str, Any], most: int = sys.maxsize) -> None:
    """Raise DamagedFile if a checkpoint holds other values than a run writes.

    `most`: number of values that it may have together.
    """
    check_parts(state, most)
    for key, (words, test) in _KINDS.items():
        if key in state and not test(state[key]):
            raise DamagedFile(f"its `{key}` ({type(state[key]).__name__}) is not {words}")


def check_parts(value: Any, most: int) -> None:
    """Raise DamagedFile for values other than tensors and plain ones, deep nesting, or more than `most` parts.

    A few bytes of a pickle can describe a list that contains itself, or one that unfolds to any number of items.
    """
    level, parts = [value], 1
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for part in level:
            if isinstance(part, (dict, list, tuple)):
                parts += len(part)
                if parts > most:
                    raise DamagedFile("its values contain each other")
                if isinstance(part, dict) and not all(map(_is_plain, part)):
                    raise DamagedFile("it has a key that is neither text nor a number")
                below += part.values() if isinstance(part, dict) else part
            elif not (_is_plain(part) or type(part) is int or isinstance(part, Tensor)):
                raise DamagedFile(f"it holds a value of type {type(part).__name__}, which no checkpoint has")
        level = below
    if level:
        raise DamagedFile(f"its values are nested more than {_DEEPEST} deep")


def check_detector(
    names: Sequence[Any], imgsz: ImageSize | None, confidence: float | None, class_confidences: Sequence[float]
) -> None:
    """Raise DamagedFile if the description of a detector, in a checkpoint or an export, is impossible.

    Unknown values are None or ().
    """
    for name in names:
        if type(name) is not str or len(name) > LONGEST_CLASS_NAME:
            raise DamagedFile(
                f"it names a class {shown(name, 60)}, expected text of at most {LONGEST_CLASS_NAME} letters"
            )
    if imgsz is not None and not all(MIN_IMGSZ <= side <= MAX_IMGSZ for side in size_hw_of(imgsz)):
        raise DamagedFile(f"its size is {imgsz} pixels, expected {MIN_IMGSZ} to {MAX_IMGSZ}")
    for value in (*(() if confidence is None else (confidence,)), *class_confidences):
        if not 0 <= value <= 1:
            raise DamagedFile(f"its confidence is {value:g}, expected 0 to 1")
    if len(class_confidences) not in (0, len(names)):
        raise DamagedFile(f"it has {plural(len(class_confidences), 'confidence')} for {plural(len(names), 'class')}")


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise DamagedFile, with its name, for the first tensor with a value that is not finite."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        extremes = tensor.float().aminmax()  # propagates NaN; one pass, and no copy of float32
        if not all(map(math.isfinite, map(float, extremes))):
            raise DamagedFile(f"{shown(name)} has values that are not finite (NaN or infinite)")
