"""What each key of a checkpoint holds; a file with other values is refused before anything uses them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tessera.data.source.annotations.classes import LONGEST_CLASS_NAME
from tessera.utils.checkpoints.inert_pickle import Damaged
from tessera.utils.engine.stopping import START
from tessera.utils.text import counted, shown

MIN_IMGSZ, MAX_IMGSZ = 32, 8192  # as of --imgsz
_DEEPEST = 20


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _is_flag(value: Any) -> bool:
    return value is None or type(value) is bool or _is_number(value) or type(value) is str


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_epoch(value: Any) -> bool:
    return type(value) is int and START <= value < 2**63


def _is_losses(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and len(value) > 0 and value.is_floating_point()


def _is_anything(value: Any) -> bool:
    return True


class _Each(NamedTuple):
    """A dict: the shape of its keys, and of its values."""

    key: Any
    value: Any


class _Either(NamedTuple):
    """A value of one of two shapes."""

    one: Any
    other: Any


_TABLE = _Each(str, _is_anything)


def _has_shape(value: Any, shape: Any) -> bool:
    """Whether a value has a shape.

    A shape is None, str, Tensor or a test; `_Each` or `_Either`; a dict: these names at least, each value of its shape;
    a tuple: as many items, each of its shape; a list of one shape: any number of items of it. Items may lie in a list
    or in a tuple.
    """
    if shape is None or shape is str or shape is Tensor:
        return value is None if shape is None else isinstance(value, shape)
    match shape:
        case _Either():
            return any(_has_shape(value, one) for one in shape)
        case _Each(key_shape, value_shape):
            return isinstance(value, dict) and all(
                _has_shape(key, key_shape) and _has_shape(item, value_shape) for key, item in value.items()
            )
        case dict():
            return _has_shape(value, _TABLE) and all(
                key in value and _has_shape(value[key], shape[key]) for key in shape
            )
        case [item_shape] if isinstance(shape, list):
            return isinstance(value, (list, tuple)) and all(_has_shape(item, item_shape) for item in value)
        case tuple():
            return isinstance(value, (list, tuple)) and len(value) == len(shape) and all(map(_has_shape, value, shape))
    return bool(shape(value))


def _is_stopper(value: Any) -> bool:
    wanted = {"best_fitness": _is_number, "best_epoch": _is_epoch}
    return _has_shape(value, wanted) and _is_epoch(value.get("improved_epoch", START))  # which earlier versions lack


_TENSORS = "tensors by name", _Each(str, Tensor)
_VALUES = "values by name", _TABLE
_TEXT = "text", str
_COUNT = "a whole number", _is_count
_MOMENTS = _Each(str, _Either(Tensor, _Either(_is_number, None)))
_SCALE = {
    **dict.fromkeys(("scale", "growth_factor", "backoff_factor"), _is_number),
    **dict.fromkeys(("growth_interval", "_growth_tracker"), _is_count),
}
_RNG = {
    "python": (_is_count, [_is_count], _Either(_is_number, None)),
    "numpy": (str, [_is_count], _is_count, _is_count, _is_number),
    "torch": Tensor,
    "cuda": _Either(Tensor, None),
}
_THRESHOLDS = {"confidence": _is_number, "class_confidences": [_is_number]}
# What a message calls each key's value, and its shape.
_KINDS: Mapping[str, tuple[str, Any]] = {
    "model": _TENSORS,
    "ema": _TENSORS,
    "ema_updates": _COUNT,
    "optimizer": (
        "an optimizer's state",
        {"state": _Each(_is_count, _MOMENTS), "param_groups": [{"params": [_is_count]}]},
    ),
    "scaler": ("the state of a loss scale", _Either(lambda value: value == {}, _SCALE)),
    **dict.fromkeys(("epoch", "step", "step_in_epoch", "epoch_skipped", "skipped_steps"), _COUNT),
    "epoch_losses": ("a row of losses a rank", _is_losses),
    "class_maps": ("a list of numbers", [_is_number]),
    "best_fitness": ("a number", _is_number),
    "stopper": ("the best epoch", _is_stopper),
    "rng": ("the states of generators", _RNG),
    "config": ("flags by name", _Each(str, _Either(_is_flag, [_is_flag]))),
    "hyp": _VALUES,
    "model_yaml": _VALUES,
    "names": ("a list of text", [str]),
    "stride": ("a list of numbers", [_is_number]),
    "imgsz": ("a whole number, or nothing", _Either(_is_count, None)),
    "anchors": ("a tensor, or nothing", _Either(Tensor, None)),
    "pixels": (
        "two limits of levels, or nothing",
        _Either(_Each(str, (_is_number, _is_number)), None),
    ),
    "metrics": ("numbers by name, or nothing", _Either(_Each(str, _is_number), None)),
    "thresholds": ("confidences, or nothing", _Either(_THRESHOLDS, None)),
    "dataset_hash": _TEXT,
    "date": _TEXT,
    "tessera_version": ("text, or nothing", _Either(str, None)),
    "git": ("text, or nothing", _Either(str, None)),
}


def check_values(state: Mapping[str, Any], most: int = sys.maxsize) -> None:
    """Check that a checkpoint holds tensors and plain values alone, and such as later code relies on.

    Args:
        state: has every key of a checkpoint, or of one with weights alone.
        most: values that it may have together.

    Raises:
        Damaged: one is of another kind; names it, and what was expected.
    """
    check_parts(state, most)
    for key, (words, shape) in _KINDS.items():
        if key in state and not _has_shape(state[key], shape):
            raise Damaged(f"its `{key}` ({type(state[key]).__name__}) is not {words}")


def check_detector(
    names: Sequence[Any], imgsz: int | None, confidence: float | None, class_confidences: Sequence[float]
) -> None:
    """Check what a file of any format, a checkpoint or an export, says of the detector in it.

    Args:
        names: classes by index.
        imgsz: size in pixels that it was trained at, or is made for; None where the file does not say.
        confidence: that suits it; None where the file does not say.
        class_confidences: that suit its classes; () where the file does not say.

    Raises:
        Damaged: a value that no detector has; names it, and what was expected.
    """
    for name in names:
        if type(name) is not str or len(name) > LONGEST_CLASS_NAME:
            raise Damaged(f"it names a class {shown(name, 60)}, expected text of at most {LONGEST_CLASS_NAME} letters")
    if imgsz is not None and not MIN_IMGSZ <= imgsz <= MAX_IMGSZ:
        raise Damaged(f"its size is {imgsz} pixels, expected {MIN_IMGSZ} to {MAX_IMGSZ}")
    for value in (*(() if confidence is None else (confidence,)), *class_confidences):
        if not 0 <= value <= 1:
            raise Damaged(f"it says a confidence of {value:g}, expected 0 to 1")
    if len(class_confidences) not in (0, len(names)):
        raise Damaged(f"it says {counted(len(class_confidences), 'confidence')} for {counted(len(names), 'class')}")


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Check that every number of a model's tensors is one.

    Raises:
        Damaged: names the first tensor with another.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        extremes = tensor.float().aminmax()  # NaN where one number is: one pass, and of float32 without a copy
        if not all(map(math.isfinite, map(float, extremes))):
            raise Damaged(f"{shown(name)} has numbers that are not finite (NaN or infinite)")


def check_parts(value: Any, most: int) -> None:
    """Check that a value has tensors and plain values alone, not very deep, and no more than `most`.

    A pickle of some bytes can describe a list that contains itself, or that unfolds to any number of items.

    Raises:
        Damaged: it has others, is deeper or has more.
    """
    level, parts = [value], 1
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for part in level:
            if isinstance(part, (dict, list, tuple)):
                parts += len(part)
                if parts > most:
                    raise Damaged("its values contain each other")
                if isinstance(part, dict) and not all(map(_is_flag, part)):
                    raise Damaged("it has a name that is no text or number")
                below += part.values() if isinstance(part, dict) else part
            elif not (_is_flag(part) or type(part) is int or isinstance(part, Tensor)):
                raise Damaged(f"it holds a {type(part).__name__}, which no checkpoint has")
        level = below
    if level:
        raise Damaged(f"its values lie in each other more than {_DEEPEST} deep")
