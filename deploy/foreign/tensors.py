"""Tensor tables in files of other programs: search, validation and conversion shared by all families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from tessera.utils.checkpoints.archive import DamagedFile
from tessera.utils.checkpoints.format import check_finite
from tessera.utils.text import shown

# Keys under which trainers save tensors, the EMA first, and prefixes of the names.
_PLACES = ("ema", "model", "state_dict", "model_state_dict")
_PREFIXES = ("ema.model.", "model.model.", "module.", "model.", "")
_MOST = 20_000  # tensors of a table; more than any model has
_COUNTER = "num_batches_tracked"  # the only integers of a model


@dataclass(frozen=True)
class ConvertedWeights:
    """Weights of another program under this program's names."""

    state_dict: dict[str, Tensor]  # float32, and counters
    model_yaml: dict[str, Any]
    names: tuple[str, ...] = ()  # classes by index; () if the file has none


class WrongTensors(Exception):
    """Tensors of a known family that cannot be converted; the text says what was found and expected."""


def find_table(content: Any, marker: str) -> dict[str, Tensor] | None:
    """Return the tensors of a family under their original names; None if none is called `marker`."""
    places = [*(content.get(place) for place in _PLACES), content] if isinstance(content, dict) else []
    for table in (place for place in places if isinstance(place, dict)):
        for prefix in _PREFIXES:
            if isinstance(table.get(prefix + marker), Tensor):
                return {
                    name.removeprefix(prefix): value
                    for name, value in table.items()
                    if isinstance(name, str) and name.startswith(prefix) and isinstance(value, Tensor)
                }
    return None


def checked_copy(tensors: Mapping[str, Tensor], limit: int) -> dict[str, Tensor]:
    """Copy tensors, floating ones as float32.

    Raises:
        WrongTensors: there are too many, they overlap and exceed `limit` elements, or one has an unexpected type or
            value.
    """
    if len(tensors) > _MOST:
        raise WrongTensors(f"it has {len(tensors):,} tensors, more than any model")
    if sum(tensor.numel() for tensor in tensors.values()) > limit:
        raise WrongTensors("its tensors share their storages")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and not name.endswith(_COUNTER):
            reject_tensor(name, f"of {str(tensor.dtype).removeprefix('torch.')}", "floating point numbers")
    full = {
        name: (tensor.float() if tensor.is_floating_point() else tensor).clone().contiguous()
        for name, tensor in tensors.items()
    }
    try:
        check_finite(full)
    except DamagedFile as error:
        raise WrongTensors(str(error)) from error
    for name, tensor in full.items():
        if name.endswith("running_var") and tensor.numel() and float(tensor.min()) < 0:
            raise WrongTensors(f"{shown(name)} has a variance below 0")
    return full


def shape_of(tensors: Mapping[str, Tensor], name: str, sides: int) -> tuple[int, ...]:
    """Return the shape of a tensor; WrongTensors if it is missing, empty or has other than `sides` dimensions."""
    if name not in tensors:
        raise WrongTensors(f"it has no {name}")
    shape = tuple(tensors[name].shape)
    if len(shape) != sides or 0 in shape:
        reject_tensor(name, shape, f"{sides} non-empty dimensions")
    return shape


def require_shape(tensors: Mapping[str, Tensor], name: str, expected: tuple[int, ...]) -> None:
    """Raise WrongTensors if a tensor has another shape.

    Checked for the largest tensors, this bounds the memory of a model whose size one tensor claims.
    """
    found = shape_of(tensors, name, len(expected))
    if found != expected:
        reject_tensor(name, found, expected)


def reject_tensor(name: str, found: object, expected: object) -> NoReturn:
    raise WrongTensors(f"{shown(name)} is {found}, expected {expected}")
