"""Tables of tensors in a file of another program, and what is common to bringing them here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from tessera.utils.checkpoints.restricted_unpickler import Damaged
from tessera.utils.checkpoints.schema import check_finite
from tessera.utils.text import shown

# Where trainers put a table of tensors, the averaged weights first, and what they write before each name.
_PLACES = ("ema", "model", "state_dict", "model_state_dict")
_PREFIXES = ("ema.model.", "model.model.", "module.", "model.", "")
_MOST = 20_000  # tensors of a table; more than any model has
_COUNTER = "num_batches_tracked"  # of a normalisation: the only whole numbers of a model


@dataclass(frozen=True)
class Imported:
    """Weights of another program in this one's names."""

    state_dict: dict[str, Tensor]  # float32, and counters
    model_yaml: dict[str, Any]
    names: tuple[str, ...] = ()  # classes by index; () where the file has none


class UnfitWeights(Exception):
    """The tensors are of the family, but not such as can be taken; the text says what was found and expected."""


def find_table(content: Any, marker: str) -> dict[str, Tensor] | None:
    """Return the tensors of a family by the names that its own code gives them; None where none is called `marker`."""
    for table in _tables(content):
        for prefix in _PREFIXES:
            if isinstance(table.get(prefix + marker), Tensor):
                return {
                    name.removeprefix(prefix): value
                    for name, value in table.items()
                    if isinstance(name, str) and name.startswith(prefix) and isinstance(value, Tensor)
                }
    return None


def find_name(content: Any, pattern: re.Pattern[str]) -> str:
    """Return the first match in a tensor's name; "" where there is none."""
    for table in _tables(content):
        for name, value in table.items():
            if isinstance(value, Tensor) and isinstance(name, str) and (found := pattern.search(name)):
                return found[0]
    return ""


def _tables(content: Any) -> Iterator[dict[Any, Any]]:
    """Where a file may have its tensors, the averaged ones first."""
    if isinstance(content, dict):
        for table in (*(content.get(place) for place in _PLACES), content):
            if isinstance(table, dict):
                yield table


def loaded(tensors: Mapping[str, Tensor], limit: int) -> dict[str, Tensor]:
    """Copy tensors, which may have `limit` elements together: floating ones as float32, others as they are.

    Raises:
        UnfitWeights: there are too many, they overlap, or one is of another kind or has a number that is not finite.
    """
    if len(tensors) > _MOST:
        raise UnfitWeights(f"it has {len(tensors):,} tensors, more than any model")
    if sum(tensor.numel() for tensor in tensors.values()) > limit:
        raise UnfitWeights("its tensors share their storages")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and not name.endswith(_COUNTER):
            refuse_tensor(name, f"of {str(tensor.dtype).removeprefix('torch.')}", "floating point numbers")
    full = {
        name: (tensor.float() if tensor.is_floating_point() else tensor).clone().contiguous()
        for name, tensor in tensors.items()
    }
    try:
        check_finite(full)
    except Damaged as error:
        raise UnfitWeights(str(error)) from error
    for name, tensor in full.items():
        if name.endswith("running_var") and tensor.numel() and float(tensor.min()) < 0:
            raise UnfitWeights(f"{shown(name)} has a variance below 0")
    return full


def shape_of(tensors: Mapping[str, Tensor], name: str, sides: int) -> tuple[int, ...]:
    """Return the shape of a tensor; UnfitWeights where it is missing, empty or has another number of sides."""
    if name not in tensors:
        raise UnfitWeights(f"it has no {name}")
    shape = tuple(tensors[name].shape)
    if len(shape) != sides or 0 in shape:
        refuse_tensor(name, shape, f"{sides} sides of at least 1")
    return shape


def require_shape(tensors: Mapping[str, Tensor], name: str, expected: tuple[int, ...]) -> None:
    """Raise UnfitWeights where a tensor is not of the shape that others ask for.

    A model of a size that one tensor claims takes no more memory than the file where its largest ones are there too.
    """
    found = shape_of(tensors, name, len(expected))
    if found != expected:
        refuse_tensor(name, found, expected)


def refuse_tensor(name: str, found: object, expected: object) -> NoReturn:
    raise UnfitWeights(f"{shown(name)} is {found}, expected {expected}")
