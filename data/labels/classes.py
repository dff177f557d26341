"""Classes of a dataset YAML (`names`, `ignore`, `classes`), and class names of weights matched to them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.text import first_of, is_one_line, plural, shown
from tessera.utils.yaml_file import Row, YamlMapping

LONGEST_CLASS_NAME = 200  # must fit tables, plots and file names
_NAMES = "a list, or a map from 0, 1, 2 … to names"
SINGLE_CLASS = "item"  # of --single-cls


class Classes(NamedTuple):
    """Class fields of a DatasetSpec."""

    names: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    parts: tuple[tuple[str, ...], ...] = ()
    excluded_names: tuple[str, ...] = ()


def parse_classes(found: YamlMapping) -> Classes:
    """Return the classes of `names`, `ignore` and `classes`; raise a ConfigError for a mistake in one of them."""
    return _select_classes(found, _all_classes(found), is_numbered=True)


def _all_classes(found: YamlMapping) -> Classes:
    """Return the trained and the ignored classes, which together number the classes of label files."""
    names = _numbered_names(found, "names", 0)
    if not found.values.get("ignore"):
        _require_all_numbers(found, names)
        return Classes(tuple(names.values()))
    ignore = _numbered_names(found, "ignore", max(names) + 1)
    where = found.at("ignore")
    numbers = {name: number for number, name in names.items()}
    if not names.keys() - {numbers.get(name) for name in ignore.values()}:
        raise ConfigError(f"{where}: ignore: found all of names, so no class is trained. Remove one from ignore.")
    for number, name in ignore.items():
        if name in numbers:
            raise ConfigError(
                f"{where}: ignore: {shown(name)} is in names too. Remove it from ignore, or write "
                "names and ignore as maps from class numbers: names without it, and `ignore: "
                f"{{{numbers[name]}: {json.dumps(name, ensure_ascii=False)}}}` and the other ignored classes."
            )
        if number in names:
            raise ConfigError(
                f"{where}: ignore: class {number} is {shown(name)}, but in names it is {shown(names[number])}. Give "
                "each class a number of its own."
            )
    together = dict(sorted({**names, **ignore}.items()))
    _require_all_numbers(found, together)
    return Classes(tuple(names.values()), tuple(ignore.values()), tuple(together.values()))


def _numbered_names(found: YamlMapping, key: str, first: int) -> dict[int, str]:
    """Return class → name in ascending order, of a map or of a list that counts from `first`."""
    names, where = found.values.get(key), found.at(key)
    if not names or not isinstance(names, (list, dict)):
        raise ConfigError(f"{where}: {key}: found {shown(names)}, expected {_NAMES}. Name the classes of the labels.")
    rows: dict[int, Row] = {first + row: row for row in range(len(names))}  # class → its row in the file
    if isinstance(names, dict):
        keys = [int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 10 else key for key in names]
        number, times = Counter(keys).most_common(1)[0]
        if times > 1:  # 0 and "0"
            raise ConfigError(f"{where}: {key}: found the key {shown(number)} twice, expected each once.")
        if odd := [number for number in keys if type(number) is not int or number < 0]:
            raise ConfigError(f"{where}: {key}: found the key {shown(odd[0])}, expected {_NAMES} without gaps.")
        rows = dict(sorted(zip(keys, map(str, names), strict=True)))
        names = [name for _, name in sorted(zip(keys, names.values(), strict=True), key=lambda pair: pair[0])]
    # Windows editors may put a byte-order mark before a text.
    names = [name.removeprefix("\ufeff") if isinstance(name, str) else name for name in names]
    for number, name in zip(rows, names, strict=True):
        if isinstance(name, bool) or not isinstance(name, (str, int, float)) or name == "":
            raise ConfigError(
                f"{found.at(key, rows[number])}: {key}: class {number} is {shown(name)}, expected a name. "
                f"{'Write a text.' if isinstance(name, (list, dict, str)) else 'Put it in quotes.'}"
            )
        _check_name(f"{found.at(key, rows[number])}: {key}: class {number} is", str(name))
    numbered = dict(zip(rows, map(str, names), strict=True))
    twice, times = Counter(numbered.values()).most_common(1)[0]
    if times > 1:
        numbers = [number for number, name in numbered.items() if name == twice]
        raise ConfigError(
            f"{found.at(key, rows[numbers[1]])}: {key}: {shown(twice)} is the name of classes "
            f"{first_of(list(map(str, numbers)), 8, ' and ')}. Give each its own."
        )
    nc = found.values.get("nc")
    if key == "names" and nc is not None and (type(nc) is not int or nc != len(names)):
        raise ConfigError(
            f"{found.at('nc')}: nc is {shown(nc)}, but names has {plural(len(names), 'class')}. Make them "
            "agree, or remove nc."
        )
    return numbered


def _check_name(found: str, name: str) -> None:
    if not name or len(name) > LONGEST_CLASS_NAME or not is_one_line(name):
        raise ConfigError(
            f"{found} {shown(name)}, expected a name of at most {LONGEST_CLASS_NAME} characters on one line, without "
            "control characters."
        )


def _require_all_numbers(found: YamlMapping, names: Mapping[int, str]) -> None:
    """Raise unless the classes count from 0 without gaps."""
    missing = next((number for number in range(len(names)) if number not in names), None)
    if missing is not None:
        raise ConfigError(
            f"{found.at('names')}: names: found the key {max(names)}, but none for class {missing}, expected {_NAMES} "
            "without gaps."
        )


def parse_coco_classes(found: YamlMapping, categories: list[str]) -> Classes:
    """Return the classes of a YAML without `names`: all categories except the ignored ones."""
    ignore = list(_numbered_names(found, "ignore", 0).values()) if found.values.get("ignore") else []
    for name in ignore:
        if name not in categories:
            raise ConfigError(
                f"{found.at('ignore')}: ignore: no category is named {shown(name)}.{did_you_mean(name, categories)}"
            )
    trained = [name for name in categories if name not in ignore]
    if categories and not trained:
        raise ConfigError(
            f"{found.at('ignore')}: ignore: found all {len(categories)} categories, so no class is trained. Remove one."
        )
    every = _all_classes(dataclasses.replace(found, values={**found.values, "names": trained, "ignore": ignore}))
    return _select_classes(found, every, is_numbered=False)


def _select_classes(found: YamlMapping, every: Classes, *, is_numbered: bool) -> Classes:
    """Apply the key `classes`, which selects and merges classes; `is_numbered` allows class numbers as entries."""
    if "classes" not in found.values:
        return every
    stated = found.values["classes"]
    if not stated or not isinstance(stated, (list, dict)):
        raise ConfigError(
            f"{found.at('classes')}: classes: found {shown(stated)}, expected a list of classes or a map from names to "
            "the classes that each merges. Remove the key to use all classes."
        )
    label_names = every.label_names or every.names
    owners: dict[str, str] = {}  # name in labels → class
    parts: dict[str, tuple[str, ...]] = {}
    rows = stated.items() if isinstance(stated, dict) else ((number, [part]) for number, part in enumerate(stated))
    for row, of_row in rows:
        where = f"{found.at('classes', row if isinstance(stated, list) else str(row))}: classes:"
        own = of_row if isinstance(of_row, list) else [of_row]
        known = tuple(_resolve_class(where, part, label_names, is_numbered) for part in own)
        if not known:
            raise ConfigError(f"{where} {shown(row)} merges no class. Name at least one.")
        name = str(row) if isinstance(stated, dict) else known[0]
        _check_name(f"{where} found the name", name)
        for part in (name, *known):
            if part in every.ignore:
                raise ConfigError(
                    f"{where} {shown(part)} is in ignore too, whose objects are neither trained nor background. Remove "
                    "it from one of the two."
                )
        for part in known:
            if part in owners:
                twice = "" if owners[part] == name else f", in {shown(owners[part])} and in {shown(name)}"
                raise ConfigError(f"{where} found {shown(part)} twice{twice}, expected each class once.")
            owners[part] = name
        if name in parts:
            raise ConfigError(f"{where} found the name {shown(name)} twice, expected each once.")
        parts[name] = known
    excluded_names = tuple(name for name in label_names if name not in owners and name not in every.ignore)
    return Classes(tuple(parts), every.ignore, label_names, tuple(parts.values()), excluded_names)


def _resolve_class(where: str, part: Any, label_names: Sequence[str], is_numbered: bool) -> str:
    """Return the label name that an entry of `classes` refers to; an integer is a class number of label files."""
    if type(part) is not int:
        if str(part) in label_names:
            return str(part)
        raise ConfigError(
            f"{where} no class of the labels is named {shown(part)}.{did_you_mean(str(part), label_names)}"
        )
    if not is_numbered:
        raise ConfigError(f"{where} found {part}, but COCO categories are selected by name. Write the name.")
    if not 0 <= part < len(label_names):
        raise ConfigError(f"{where} found {part}, but the classes of the labels are 0 to {len(label_names) - 1}.")
    return label_names[part]


def match_classes(known: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    """Return the index in `known` of each class of `wanted`; -1 for a class that `known` lacks.

    Equal names match first, then names that differ only in case and spaces, if one is left on each side. Class numbers
    ("0", "1") are not names: such classes match by index if both lists are equally long. So does the single class of
    --single-cls.
    """
    numbered = _are_numbers(known) or _are_numbers(wanted)
    if len(known) == len(wanted) and (numbered or [SINGLE_CLASS] in (list(known), list(wanted))):
        return tuple(range(len(wanted)))
    found = [-1] * len(wanted)
    spellings: tuple[Callable[[str], str], ...] = (
        () if numbered else (str, lambda name: "".join(name.casefold().split()))
    )
    for spelled in spellings:
        taken = set(found)
        offered = [(spelled(name), number) for number, name in enumerate(known) if number not in taken]
        unmatched = [(spelled(name), number) for number, name in enumerate(wanted) if found[number] < 0]
        number_of = dict(offered)
        counts = [Counter(name for name, _ in side) for side in (offered, unmatched)]
        for name, number in unmatched:
            if counts[0][name] == counts[1][name] == 1:
                found[number] = number_of[name]
    return tuple(found)


def has_placeholder_names(names: Sequence[str]) -> bool:
    """Return whether the names are only class numbers, or the single class of --single-cls."""
    return _are_numbers(names) or list(names) == [SINGLE_CLASS]


def renamed_classes(before: Sequence[str], now: Sequence[str]) -> str:
    """Return the classes whose names differ at the same index, if they are the majority; else ""."""
    if len(before) != len(now) or has_placeholder_names(before):
        return ""
    pairs = enumerate(zip(before, now, strict=True))
    renamed = [
        f"{number} is {shown(old)} in the checkpoint and {shown(new)} in the data"
        for number, (old, new) in pairs
        if old.strip().casefold() != new.strip().casefold()
    ]
    return first_of(renamed, 3) if 2 * len(renamed) > len(now) else ""


def reordered_classes(before: Sequence[str], now: Sequence[str]) -> str:
    """Return the classes with another index in `now`: "'cat' is 0 in the checkpoint and 1 in the data"."""
    places = {name.strip().casefold(): number for number, name in enumerate(now)}
    moved = [
        f"{shown(name)} is {number} in the checkpoint and {place} in the data"
        for number, name in enumerate(before)
        if (place := places.get(name.strip().casefold(), number)) != number
    ]
    return first_of(moved, 3)


def _are_numbers(names: Sequence[str]) -> bool:
    return list(names) == [str(number) for number in range(len(names))]
