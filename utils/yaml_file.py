"""YAML reader with line numbers, and writer, for dataset, model and hyperparameter files.

It returns plain values only; no tag makes an object or runs code. Size, depth and number of values are bounded before
anything is constructed, as a file may be hostile.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tessera.utils.errors import ConfigError
from tessera.utils.files import open_plain
from tessera.utils.text import one_line, shown

_WHOLE = re.compile("-?(?:0|[1-9][0-9]*)")
MAX_BYTES = 2 << 20  # 20,000 class names are 0.5 MB
MAX_DEPTH = 32
MAX_VALUES = 100_000  # 20,000 class names with their numbers are 40,000
MAX_DIGITS = 200  # any such number is a finite float too
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_TEXT = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"

Row = int | str  # index in a list, or key of a mapping as written


@dataclass(frozen=True)
class YamlMapping:
    """Keys and values with their line numbers."""

    name: str  # file name for messages
    values: dict[str, Any]
    # Lines, from 1, of top-level keys (key, None) and of their rows (key, row); empty without a file.
    lines: Mapping[tuple[str, Row | None], int] = field(default_factory=dict)

    def at(self, key: str, row: Row | None = None) -> str:
        """Return "file:line" of a key or of one of its rows; without a line, "name" or "name: key[row]"."""
        line = self.lines.get((key, row))
        if line is not None:
            return f"{self.name}:{line}"
        return self.name if row is None else f"{self.name}: {key}[{row}]"


def read_yaml(path: Path, expected: str, texts: Collection[str] = ()) -> YamlMapping:
    """Read a YAML file that holds keys and values.

    Args:
        expected: description for errors, such as "keys such as train, val and names".
        texts: keys below which numbers such as 010, 12:30 or 1.10 stay text; YAML 1.1 reads them as 8, 750 and 1.1.

    Raises:
        ConfigError: an unreadable or invalid file, or one that exceeds the bounds; with the line if known.
    """
    try:
        loader = _Loader(_read_text(path), shown(path))
        root = loader.get_single_node()
        for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
            if key.value in texts:
                _keep_texts(value)
        values = loader.construct_document(root) if root is not None else None
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{shown(path)}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown(path)}: not UTF-8 text. Save it as UTF-8.") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = one_line(str(error.problem or error.context), 120)
        raise ConfigError(f"{shown(path)}{line}: not valid YAML: {problem}. Check indentation and quotes.") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        # PyYAML does not catch errors of invalid values, such as the date 2020-13-01.
        raise ConfigError(f"{shown(path)}: not valid YAML: {one_line(str(error), 120)}.") from error
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise ConfigError(f"{shown(path)}: found {found}, expected {expected}.")
    return YamlMapping(shown(path), values, _lines(root))


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return `values` as YAML, keys in their order.

    Paths become strings; tuples and arrays become lists; NumPy numbers become plain ones.
    """
    return str(yaml.safe_dump(_plain(values), sort_keys=False, allow_unicode=True))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value  # of NumPy, whose import would delay every message


def _read_text(path: Path) -> str:
    with open_plain(path) as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"{shown(path)}: larger than {MAX_BYTES >> 20} MiB, the limit for a configuration. Check the file "
            "name. Lists of images belong in a .txt."
        )
    return raw.decode("utf-8-sig")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds, and with an error for repeated keys.

    Aliases and merges repeat the values of their anchor, so a few lines can stand for 10^9 values.
    """

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self._name = name
        self._depth = 0
        self._sizes: dict[yaml.Node, int] = {}  # values in each complete node, aliases expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Compose a node, as PyYAML does for the document and each key, value and entry, and check it."""
        is_alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._refusal(mark, f"nested deeper than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        assert node is not None, "never None in PyYAML"
        self._depth -= 1
        if is_alias:
            if node not in self._sizes:
                raise self._refusal(mark, "an alias inside its own anchor")
            return node
        self._sizes[node] = 1 + sum(self._sizes[part] for part in _parts(node))
        if max(self._sizes[node], len(self._sizes)) > MAX_VALUES:
            raise self._refusal(mark, f"more than {MAX_VALUES:,} values, counting each alias as all it stands for")
        if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
            raise self._refusal(mark, f"a number of {len(node.value):,} characters")
        if isinstance(node, yaml.MappingNode):
            self._refuse_repeated_keys(node)
        return node

    def _refuse_repeated_keys(self, node: yaml.MappingNode) -> None:
        """Raise ConfigError for a repeated key, of which PyYAML would keep the last value."""
        seen: dict[object, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                first = seen.setdefault(_MERGE if key.tag == _MERGE else self.construct_object(key), key)
                self.constructed_objects.pop(key, None)  # the key may still become text
                if first is not key:
                    raise ConfigError(
                        f"{self._name}:{key.start_mark.line + 1}: the key {shown(key.value)} is already on line "
                        f"{first.start_mark.line + 1}. Remove one."
                    )

    def _refusal(self, mark: yaml.Mark, found: str) -> ConfigError:
        return ConfigError(f"{self._name}:{mark.line + 1}: not valid here: {found}.")


def _keep_texts(node: yaml.Node) -> None:
    """Tag numbers below a node as text, except whole ones without a sign or leading zeros."""
    if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and not _WHOLE.fullmatch(node.value):
        node.tag = _TEXT
    for part in _parts(node):
        _keep_texts(part)


def _parts(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return itertools.chain.from_iterable(node.value)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def _lines(root: yaml.MappingNode) -> dict[tuple[str, Row | None], int]:
    lines: dict[tuple[str, Row | None], int] = {}
    for key, value in root.value:
        lines[str(key.value), None] = key.start_mark.line + 1
        if isinstance(value, yaml.SequenceNode):
            lines.update(((str(key.value), row), node.start_mark.line + 1) for row, node in enumerate(value.value))
        elif isinstance(value, yaml.MappingNode):
            lines.update(((str(key.value), str(row.value)), row.start_mark.line + 1) for row, _ in value.value)
    return lines
