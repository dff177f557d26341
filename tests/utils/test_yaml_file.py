"""YAML files: lines of keys, and error messages, alike for datasets, models and hyperparameters."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.data.source.dataset_yaml import load_spec
from tessera.models.model_yaml import read_model
from tessera.utils.config import load_hyp
from tessera.utils.errors import ConfigError
from tessera.utils.yaml_file import YamlMapping, read_yaml

READERS = pytest.mark.parametrize("read", [load_spec, read_model, load_hyp], ids=["data", "model", "hyp"])


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "a.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_lines_of_keys_and_rows(tmp_path: Path) -> None:
    found = read_yaml(write(tmp_path, "# note\na: 1\nb:\n  - x\n\n  - y\nc:\n  0: cat\n  dog: 2\n"), "keys")
    assert found.values == {"a": 1, "b": ["x", "y"], "c": {0: "cat", "dog": 2}}
    places = [("a", None), ("b", None), ("b", 1), ("c", "0"), ("c", "dog")]
    assert [found.at(key, row) for key, row in places] == [f"{tmp_path}/a.yaml:{line}" for line in (2, 3, 6, 8, 9)]
    assert found.at("d") == f"{tmp_path}/a.yaml" and found.at("d", 1) == f"{tmp_path}/a.yaml: d[1]"
    assert YamlMapping("mine", {"a": [1]}).at("a", 0) == "mine: a[0]"


@READERS
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"a\.yaml:3: the key 'a' is already on line 1\. Remove one\."),
        ("a: 1\nb:\n  0: cat\n  0: dog\n", r"a\.yaml:4: the key '0' is already on line 3\. Remove one\."),
        ("a: [{b: 1, b: 2}]\n", r"a\.yaml:1: the key 'b' is already on line 1\."),
        ("a: 1\nb: [2\nc: 3\n", r"a\.yaml:3: not valid YAML: .*Check indentation and quotes\."),
        ("a: 1\nb: !!python/object/apply:os.system ['touch x']\n", r"a\.yaml:2: not valid YAML"),
        ("a: 2020-13-01\n", r"a\.yaml: not valid YAML: "),
        ("a: !!timestamp soon\n", r"a\.yaml: not valid YAML: "),
        ("[" * 5000, r"a\.yaml:1: .*nested deeper than 32 levels"),
        ("- " * 5000, r"a\.yaml:1: .*nested deeper than 32 levels"),
        ("a: &a [*a]\n", r"a\.yaml:1: .*an alias inside its own anchor"),
        ("a: " + "9" * 6000 + "\n", r"a\.yaml:1: .*a number of 6,000 characters"),
        ("a: " + "59:" * 6000 + "1\n", r"a\.yaml:1: .*a number of 18,001 characters"),
        ("a: *" + "b" * 6000 + "\n", r"a\.yaml:1: not valid YAML: found undefined alias 'bbb.{60,140}$"),
        ("a:\n  0: cat\n  '0': dog\n  00: dog\n", r"a\.yaml:4: the key '00' is already on line 2\."),
        ("- 1\n- 2\n", r"a\.yaml: found list, expected .*key"),
        ("", r"a\.yaml: found nothing, expected "),
        (b"\xff\xfe\x00", r"a\.yaml: not UTF-8 text\. Save it as UTF-8\."),
        ("a\0b: 1\n", r"a\.yaml: not valid YAML: "),
    ],
)
def test_mistakes_read_alike_in_every_kind(
    tmp_path: Path, read: Callable[[Path], Any], content: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read(write(tmp_path, content))
    assert str(error.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("read", "key"), [(load_spec, "name"), (read_model, "noc"), (load_hyp, "momentun")], ids=["data", "model", "hyp"]
)
def test_an_unknown_key_names_its_line(tmp_path: Path, read: Callable[[Path], Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"a\.yaml:2: unknown (key|hyperparameter) '{key}'"):
        read(write(tmp_path, f"# note\n{key}: 1\n"))


def test_aliases_and_merges_are_not_repeated_keys(tmp_path: Path) -> None:
    found = read_yaml(write(tmp_path, "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\n"), "keys")
    assert found.values == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}


def bomb(kind: str, levels: int = 9) -> str:
    """Ten aliases a level."""
    lines = ["a0: &a0 {x: 1}" if kind == "merge" else "a0: &a0 [x]"]
    for level in range(1, levels):
        below = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} " + (f"{{<<: [{below}]}}" if kind == "merge" else f"[{below}]"))
    return "\n".join(lines)


@READERS
@pytest.mark.parametrize("kind", ["alias", "merge"])
def test_a_bomb_is_refused_before_it_grows(tmp_path: Path, read: Callable[[Path], Any], kind: str) -> None:
    with pytest.raises(ConfigError, match=r"a\.yaml:[67]: .*more than 100,000 values"):
        read(write(tmp_path, bomb(kind)))


@READERS
def test_a_file_that_is_no_configuration_is_not_parsed(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    path = write(tmp_path, "")
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"a\.yaml: larger than 2 MiB"):
        read(path)


def test_a_special_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml: cannot be read \(it is a FIFO, expected a plain file\)"):
        read_yaml(tmp_path / "a.yaml", "keys")
