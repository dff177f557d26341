"""A YAML file with the line of each key: what the readers of datasets, models and hyperparameters start from.

Plain values only: no tag of a YAML ever makes an object or runs anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from utils.errors import ConfigError

Row = int | str  # of a list: its index; of a map: its key as written


@dataclass(frozen=True)
class YamlMapping:
    """Keys and values, and where they were written.

    Attributes:
        name: the file, or what else messages call it.
        values: plain values by key.
        lines: line of each top-level key (key, None) and of each of its rows (key, row), from 1; empty without a file.
    """

    name: str
    values: dict[str, Any]
    lines: Mapping[tuple[str, Row | None], int] = field(default_factory=dict)

    def at(self, key: str, row: Row | None = None) -> str:
        """Return "file:line" of a key or of one of its rows; where the line is unknown, "name" or "name: key[row]"."""
        line = self.lines.get((key, row))
        if line is not None:
            return f"{self.name}:{line}"
        return self.name if row is None else f"{self.name}: {key}[{row}]"


def read_yaml(path: Path, expected: str) -> YamlMapping:
    """Read a YAML file that holds keys and values.

    Args:
        path: the file.
        expected: what the file should hold, such as "keys such as train, val and names".

    Raises:
        ConfigError: it cannot be read, is not YAML, has a key twice, or holds something else; with the line if known.
    """
    try:
        loader = yaml.SafeLoader(path.read_text("utf-8-sig"))
        root = loader.get_single_node()
        twice = _repeated_key(root)
        values = loader.construct_document(root) if root is not None and twice is None else None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text. Save it as UTF-8.") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = error.problem or error.context
        raise ConfigError(f"{path}{line}: not valid YAML: {problem}. Mind indentation, colons and quotes.") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # Besides its own errors PyYAML lets through those of values it cannot read, such as the date 2020-13-01.
        raise ConfigError(f"{path}: not valid YAML: {error}.") from error
    if twice is not None:
        key, first = twice
        raise ConfigError(
            f"{path}:{key.start_mark.line + 1}: the key '{key.value}' is already on line {first.start_mark.line + 1}. "
            "Remove one."
        )
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise ConfigError(f"{path}: found {found}, expected {expected}.")
    return YamlMapping(str(path), values, _lines(root))


def _repeated_key(root: yaml.Node | None) -> tuple[yaml.Node, yaml.Node] | None:
    """A key that its map already has, and the earlier one. PyYAML would silently keep the later value."""
    waiting, visited = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in visited:  # an alias
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            seen: dict[tuple[str, str], yaml.Node] = {}
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    first = seen.setdefault((key.tag, key.value), key)
                    if first is not key:
                        return key, first
                waiting.append(value)
    return None


def _lines(root: yaml.MappingNode) -> dict[tuple[str, Row | None], int]:
    lines: dict[tuple[str, Row | None], int] = {}
    for key, value in root.value:
        lines[str(key.value), None] = key.start_mark.line + 1
        if isinstance(value, yaml.SequenceNode):
            lines.update(((str(key.value), row), node.start_mark.line + 1) for row, node in enumerate(value.value))
        elif isinstance(value, yaml.MappingNode):
            lines.update(((str(key.value), str(row.value)), row.start_mark.line + 1) for row, _ in value.value)
    return lines
