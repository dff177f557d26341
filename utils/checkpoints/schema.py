"""What each key of a checkpoint holds; a file with other values is refused before anything uses them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tessera.data.source.spec import LONGEST_CLASS_NAME
from tessera.utils.checkpoints.inert_pickle import Damaged
from tessera.utils.text import shown

MIN_IMGSZ, MAX_IMGSZ = 32, 8192  # as of --imgsz

_Test = Callable[[Any], bool]
_DEEPEST = 20


class _Kind(NamedTuple):
    """A kind of value: what a message calls it, and whether a value is of it."""

    words: str
    test: _Test


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value))


def _tables_of(test: _Test) -> _Test:
    return lambda value: _is_table(value) and all(map(test, value.values()))


def _lists_of(test: _Test) -> _Test:
    return lambda value: isinstance(value, (list, tuple)) and all(map(test, value))


def _records_of(**fields: _Test) -> _Test:
    return lambda value: _is_table(value) and all(key in value and test(value[key]) for key, test in fields.items())


def _tuples_of(*tests: _Test) -> _Test:
    return lambda value: (
        isinstance(value, (list, tuple))
        and len(value) == len(tests)
        and all(test(item) for test, item in zip(tests, value, strict=True))
    )


def _either(*tests: _Test) -> _Test:
    return lambda value: any(test(value) for test in tests)


def _is_none(value: Any) -> bool:
    return value is None


def _is_flag(value: Any) -> bool:
    return value is None or type(value) is bool or _is_number(value) or _is_text(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_moment(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_count(index) and _tables_of(_either(_is_tensor, _is_number, _is_none))(kept)
        for index, kept in value.items()
    )


_COUNT = _Kind("a whole number", _is_count)
_NUMBER = _Kind("a number", _is_number)
_TENSORS = _Kind("tensors by name", _tables_of(_is_tensor))
_TABLE = _Kind("values by name", _is_table)
_TEXT = _Kind("text", _is_text)
_KINDS: Mapping[str, _Kind] = {
    "model": _TENSORS,
    "ema": _TENSORS,
    "ema_updates": _COUNT,
    "optimizer": _Kind(
        "an optimizer's state",
        _records_of(state=_is_moment, param_groups=_lists_of(_records_of(params=_lists_of(_is_count)))),
    ),
    "scaler": _Kind(
        "the state of a loss scale",
        _either(
            lambda value: value == {},
            _records_of(
                scale=_is_number,
                growth_factor=_is_number,
                backoff_factor=_is_number,
                growth_interval=_is_count,
                _growth_tracker=_is_count,
            ),
        ),
    ),
    **dict.fromkeys(("epoch", "step", "step_in_epoch", "epoch_skipped", "skipped_steps"), _COUNT),
    "epoch_losses": _Kind(
        "a row of losses a rank",
        lambda value: isinstance(value, Tensor) and value.ndim == 2 and len(value) > 0 and value.is_floating_point(),
    ),
    "class_maps": _Kind("a list of numbers", _lists_of(_is_number)),
    "best_fitness": _NUMBER,
    "stopper": _Kind("the best epoch", _records_of(best_fitness=_is_number, best_epoch=_is_count)),
    "rng": _Kind(
        "the states of generators",
        _records_of(
            python=_tuples_of(_is_count, _lists_of(_is_count), _either(_is_number, _is_none)),
            numpy=_tuples_of(_is_text, _lists_of(_is_count), _is_count, _is_count, _is_number),
            torch=_is_tensor,
            cuda=_either(_is_tensor, _is_none),
        ),
    ),
    "config": _Kind("flags by name", _tables_of(_either(_is_flag, _lists_of(_is_flag)))),
    "hyp": _TABLE,
    "model_yaml": _TABLE,
    "names": _Kind("a list of text", _lists_of(_is_text)),
    "stride": _Kind("a list of numbers", _lists_of(_is_number)),
    "imgsz": _Kind("a whole number, or nothing", _either(_is_count, _is_none)),
    "anchors": _Kind("a tensor, or nothing", _either(_is_tensor, _is_none)),
    "pixels": _Kind(
        "two limits of levels, or nothing",
        _either(_tables_of(lambda limits: _lists_of(_is_number)(limits) and len(limits) == 2), _is_none),
    ),
    "metrics": _Kind("numbers by name, or nothing", _either(_tables_of(_is_number), _is_none)),
    "thresholds": _Kind(
        "confidences, or nothing",
        _either(_records_of(confidence=_is_number, class_confidences=_lists_of(_is_number)), _is_none),
    ),
    "dataset_hash": _TEXT,
    "date": _TEXT,
    "git": _Kind("text, or nothing", _either(_is_text, _is_none)),
}


def check_values(state: Mapping[str, Any]) -> None:
    """Check the kind of every value that later code relies on.

    Args:
        state: has every key of a checkpoint, or of one with weights alone.

    Raises:
        Damaged: one is of another kind; names it, and what was expected.
    """
    for key, kind in _KINDS.items():
        if key in state and not kind.test(state[key]):
            raise Damaged(f"its `{key}` is a {type(state[key]).__name__} that is not {kind.words}")


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
        if not _is_text(name) or len(name) > LONGEST_CLASS_NAME:
            raise Damaged(f"it names a class {shown(name, 60)}, expected text of at most {LONGEST_CLASS_NAME} letters")
    if imgsz is not None and not MIN_IMGSZ <= imgsz <= MAX_IMGSZ:
        raise Damaged(f"its size is {imgsz} pixels, expected {MIN_IMGSZ} to {MAX_IMGSZ}")
    for value in (*(() if confidence is None else (confidence,)), *class_confidences):
        if not 0 <= value <= 1:
            raise Damaged(f"it says a confidence of {value:g}, expected 0 to 1")
    if len(class_confidences) not in (0, len(names)):
        raise Damaged(f"it says {len(class_confidences)} confidences for {len(names)} classes")


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
                below += part.values() if isinstance(part, dict) else part
            elif not (_is_flag(part) or type(part) is int or isinstance(part, Tensor)):
                raise Damaged(f"it holds a {type(part).__name__}, which no checkpoint has")
        level = below
    if level:
        raise Damaged(f"its values lie in each other more than {_DEEPEST} deep")
