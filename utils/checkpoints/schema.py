"""Schema of checkpoints: the expected value of each key."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tessera.data.source.annotations.classes import LONGEST_CLASS_NAME
from tessera.utils.checkpoints.restricted_unpickler import DamagedFile
from tessera.utils.engine.state import INITIAL
from tessera.utils.text import plural, shown

MIN_IMGSZ, MAX_IMGSZ = 32, 8192  # as of --imgsz
_DEEPEST = 20

_Test = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _is_plain(value: Any) -> bool:
    return value is None or type(value) is bool or _is_number(value) or type(value) is str


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_epoch(value: Any) -> bool:
    return _is_count(value, INITIAL)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _either(*tests: _Test) -> _Test:
    return lambda value: any(test(value) for test in tests)


def _optional(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _items(test: _Test) -> _Test:
    return lambda value: isinstance(value, (list, tuple)) and all(map(test, value))


def _row(*tests: _Test) -> _Test:
    return lambda value: (
        isinstance(value, (list, tuple))
        and len(value) == len(tests)
        and all(test(item) for test, item in zip(tests, value, strict=True))
    )


def _table(test: _Test = lambda value: True, key: _Test = _is_text) -> _Test:
    return lambda value: isinstance(value, dict) and all(key(k) and test(item) for k, item in value.items())


def _having(**tests: _Test) -> _Test:
    """Return a test for a dict that has these keys, and may have others."""
    is_table = _table()
    return lambda value: is_table(value) and all(name in value and test(value[name]) for name, test in tests.items())


def _is_stopper(value: Any) -> bool:
    is_one = _having(best_fitness=_is_number, best_epoch=_is_epoch)
    return is_one(value) and _is_epoch(value.get("improved_epoch", INITIAL))  # missing in earlier versions


_TENSORS = "tensors by name", _table(_is_tensor)
_VALUES = "values by name", _table()
_TEXT = "text", _is_text
_COUNT = "a whole number", _is_count
_MOMENTS = _table(_either(_is_tensor, _optional(_is_number)))
_SCALE = _having(
    **dict.fromkeys(("scale", "growth_factor", "backoff_factor"), _is_number),
    **dict.fromkeys(("growth_interval", "_growth_tracker"), _is_count),
)
_RNG = _having(
    python=_row(_is_count, _items(_is_count), _optional(_is_number)),
    numpy=_row(_is_text, _items(_is_count), _is_count, _is_count, _is_number),
    torch=_is_tensor,
    cuda=_optional(_is_tensor),
)
_OPTIMIZER = _having(state=_table(_MOMENTS, key=_is_count), param_groups=_items(_having(params=_items(_is_count))))
_THRESHOLDS = _having(confidence=_is_number, class_confidences=_items(_is_number))
# Description of each key's value for messages, and its test.
_KINDS: Mapping[str, tuple[str, _Test]] = {
    "model": _TENSORS,
    "ema": _TENSORS,
    "ema_updates": _COUNT,
    "optimizer": ("an optimizer's state", _OPTIMIZER),
    "scaler": ("the state of a loss scale", _either(lambda value: value == {}, _SCALE)),
    **dict.fromkeys(("epoch", "step", "step_in_epoch", "epoch_skipped", "skipped_steps"), _COUNT),
    "epoch_losses": (
        "a row of losses per rank",
        lambda x: _is_tensor(x) and x.ndim == 2 and len(x) > 0 and x.is_floating_point(),
    ),
    "class_maps": ("a list of numbers", _items(_is_number)),
    "best_fitness": ("a number", _is_number),
    "stopper": ("the best epoch", _is_stopper),
    "rng": ("the states of generators", _RNG),
    "config": ("flags by name", _table(_either(_is_plain, _items(_is_plain)))),
    "hyp": _VALUES,
    "model_yaml": _VALUES,
    "names": ("a list of text", _items(_is_text)),
    "stride": ("a list of numbers", _items(_is_number)),
    "imgsz": ("a whole number, or nothing", _optional(_is_count)),
    "anchors": ("a tensor, or nothing", _optional(_is_tensor)),
    "pixels": ("two limits of levels, or nothing", _optional(_table(_row(_is_number, _is_number)))),
    "metrics": ("numbers by name, or nothing", _optional(_table(_is_number))),
    "thresholds": ("confidences, or nothing", _optional(_THRESHOLDS)),
    "dataset_hash": _TEXT,
    "date": _TEXT,
    "tessera_version": ("text, or nothing", _optional(_is_text)),
    "git": ("text, or nothing", _optional(_is_text)),
}


def check_values(state: Mapping[str, Any], most: int = sys.maxsize) -> None:
    """Raise DamagedFile if a checkpoint holds other values than a run writes.

    `most`: number of values that it may have together.
    """
    check_parts(state, most)
    for key, (words, test) in _KINDS.items():
        if key in state and not test(state[key]):
            raise DamagedFile(f"its `{key}` ({type(state[key]).__name__}) is not {words}")


def check_detector(
    names: Sequence[Any], imgsz: int | None, confidence: float | None, class_confidences: Sequence[float]
) -> None:
    """Raise DamagedFile if the description of a detector, in a checkpoint or an export, is impossible.

    Unknown values are None or ().
    """
    for name in names:
        if type(name) is not str or len(name) > LONGEST_CLASS_NAME:
            raise DamagedFile(
                f"it names a class {shown(name, 60)}, expected text of at most {LONGEST_CLASS_NAME} letters"
            )
    if imgsz is not None and not MIN_IMGSZ <= imgsz <= MAX_IMGSZ:
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
