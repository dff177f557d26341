"""Class lists beside a dataset that contradict its YAML, and names that they or XML files offer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.data.source.index import problem_report
from tests.data.source.made_yaml import BODY, BOX, build, check, dataset, write

SAID = "class 0 is 'dog', but pets.yaml names it 'cat'"
NOTES = json.dumps({"categories": [{"id": 1, "name": "cat"}, {"id": 0, "name": "dog"}], "info": {}})


def pets(tmp_path: Path, names: str = "[cat, dog]") -> Path:
    dataset(tmp_path / "pets")
    return write(tmp_path / "pets.yaml", BODY.replace("[cat, dog]", names) + "path: pets\n")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("labels/train/classes.txt", "dog\ncat\n"),
        ("labels/classes.txt", "\ufeffdog\r\ncat\r\n"),
        ("classes.txt", "0: dog\n1: cat\n"),
        ("obj.names", "dog\ncat"),
        ("labels/train/predefined_classes.txt", "dog\nperson\ncat\n"),
        ("notes.json", NOTES),
        ("data.yaml", "train: ../images/train\nval: ../images/val\nnc: 2\nnames: {0: dog, 1: cat}\n"),
    ],
)
def test_a_list_that_contradicts_the_yaml_is_a_problem(tmp_path: Path, file: str, text: str) -> None:
    yaml = pets(tmp_path)
    assert not build(yaml).problems
    path = write(tmp_path / "pets" / file, text)
    assert f"{file}: {SAID}. Label files hold numbers alone" in problem_report(build(yaml)), "though an index is cached"
    assert check(yaml).exit_code == 3 and any(SAID in line for line in check(yaml).problems)
    path.unlink()
    assert not build(yaml).problems


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("labels/train/classes.txt", " Cat\n\ndog\n"),
        ("classes.txt", "cat\n"),
        ("obj.names", "cat\ndog\ncow\n"),
        ("labels/train/classes.txt", f"{BOX}1 .5 .5 .1 .1\n"),  # of classes.jpg
        ("labels.txt", "labels/train/a.jpg\nlabels/train/b.jpg\n"),
        ("labels.txt", "a.txt\nb.txt\n"),
        ("labels.txt", "These labels are checked.\nAsk Ann.\n"),
        ("labels.txt", "__background__\ncat\ndog\n"),
        ("classes.txt", "# of the tool\ncat\ndog\n"),
        ("classes.txt", "cat,dog,cow\n"),
        ("classes.txt", "cat 0\ndog 1\n"),
        ("classes.txt", "1 dog\n5 cow\n"),
        ("classes.txt", "caf\udce9\n"),
        ("notes.json", "[1, {}]"),
        ("notes.json", '{"categories": [{"id": 7, "name": "dog"}]}'),
        ("data.yaml", BODY),
        ("data.yaml", "train: elsewhere\nval: images/other\nnames: [dog, cat]\n"),
        ("data.yaml", "train: [3]\nnames: {}\n"),
        ("dataset.yaml", "- a"),
    ],
)
def test_other_files_are_silent(tmp_path: Path, file: str, text: str) -> None:
    yaml = pets(tmp_path)
    (tmp_path / "pets" / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "names it" not in problem_report(build(yaml))


def test_ignored_and_selected_classes_keep_their_numbers(tmp_path: Path) -> None:
    yaml = pets(tmp_path, "{1: dog}\nignore: {0: cat}\nclasses: [dog]")
    write(tmp_path / "pets/classes.txt", "cat\ndog\n")
    assert not [line for line in check(yaml).problems if "classes.txt" in line]
    write(tmp_path / "pets/classes.txt", "dog\ncat\n")
    assert any(SAID in line for line in check(yaml).problems)
