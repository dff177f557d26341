"""Readers of layer arguments in model YAMLs: each returns a checked value, or raises with the expected one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from tessera.utils.errors import ConfigError
from tessera.utils.text import plural, shown

# Returns the value of one argument, or raises ValueError with the expected one.
Reader = Callable[[Any], Any]


def checked(where: str, name: str, value: object, read: Reader) -> Any:
    """Return `read(value)`; a ValueError becomes a ConfigError with position, value and expectation."""
    try:
        return read(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {name} is {shown(value)}, expected {error}.") from error


def read_arguments(
    where: str, values: Sequence[Any], readers: Sequence[tuple[str, Reader]], required: int = 0
) -> list[Any]:
    """Read the arguments of the layer at `where`, of which the first `required` are mandatory; `readers` in order."""
    if not required <= len(values) <= len(readers):
        least = "" if required == len(readers) else f"{required} to "
        names = ", ".join(name for name, _ in readers)
        raise ConfigError(
            f"{where}: has {plural(len(values), 'argument')} {shown(list(values))}, expected "
            f"{least}{len(readers)}: [{names}]."
        )
    return [
        checked(where, f"argument '{name}'", value, read) for value, (name, read) in zip(values, readers, strict=False)
    ]


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether `value` is an integer, excluding YAML's true and false."""
    return isinstance(value, int) and not isinstance(value, bool)


def up_to(most: int) -> Callable[[object], int]:
    """Return a reader of integers from 1 to `most`."""

    def read(value: object) -> int:
        if is_whole(value) and 1 <= value <= most:
            return value
        raise ValueError(f"a whole number from 1 to {most:,}")

    return read


count = up_to(2**31 - 1)  # sizes of tensors are 64-bit integers


def positive(value: object) -> float:
    """Read a finite number above 0."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ValueError("a number above 0")


def flag(value: object) -> bool:
    """Read true or false."""
    if isinstance(value, bool):
        return value
    raise ValueError("true or false")


def sides_from(least: int) -> Reader:
    """Return a reader of pixels from `least`: a side, or [height, width]."""

    def read(value: object) -> int | tuple[int, int]:
        if is_whole(value) and value >= least:
            return value
        if isinstance(value, list) and len(value) == 2 and all(is_whole(side) and side >= least for side in value):
            return value[0], value[1]
        raise ValueError(f"a whole number of at least {least}, or [height, width]")

    return read


size, margin = sides_from(1), sides_from(0)


def axis(value: object) -> int:
    """Read a dimension of a (B, C, H, W) map."""
    if is_whole(value) and -3 <= value <= 3 and value != 0:
        return value
    raise ValueError("a dimension of (B, C, H, W), 1 for channels")


def padding4(value: object) -> tuple[int, ...]:
    """Read left, right, top, bottom in pixels, or one number for all."""
    sides = value if isinstance(value, list) else [value] * 4
    if len(sides) == 4 and all(map(is_whole, sides)):
        return tuple(sides)
    raise ValueError("[left, right, top, bottom] in pixels")


def optional(read: Reader) -> Reader:
    """Return a reader that also accepts null."""
    return lambda value: None if value is None else read(value)


def one_of(*choices: str) -> Reader:
    """Return a reader of one of some words."""

    def read(value: object) -> object:
        if value in choices:
            return value
        raise ValueError("one of " + ", ".join(choices))

    return read


def class_of(*classes: type) -> Reader:
    """Return a reader of the name of one of some classes."""
    read, named = one_of(*(each.__name__ for each in classes)), {each.__name__: each for each in classes}
    return lambda value: named[read(value)]


def counts(value: object) -> list[int]:
    """Read a list of integers from 1."""
    if isinstance(value, list) and value:
        try:
            return [count(entry) for entry in value]
        except ValueError as error:
            raise ValueError(f"a list, each entry {error}") from error
    raise ValueError("a list")
