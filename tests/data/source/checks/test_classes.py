"""Class checks: counting from 1, similar names, classes without objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.data.source.checks.run_checks import check_dataset
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.utils.errors import UserError
from tests.data.make import write_dataset
from tests.data.source.annotations.test_voc import voc_object, write_voc
from tests.data.source.made_yaml import check


def labels(*classes: int) -> dict[str, str]:
    return {f"train/{at}": f"{number} 0.5 0.5 0.2 0.2\n" for at, number in enumerate(classes)}


@pytest.mark.parametrize(
    ("classes", "names", "from_one"),
    [
        ((1, 2, 2), "[cat, dog]", True),
        ((1, 1), "[cat]", True),
        ((0, 1, 2), "[cat, dog]", False),  # 0 is used
        ((1, 3), "[cat, dog]", False),  # 3 is too many in any case
        ((2, 2), "[cat, dog]", False),  # nothing but 2: no sign of a count
    ],
)
def test_classes_that_count_from_one(tmp_path: Path, classes: tuple[int, ...], names: str, from_one: bool) -> None:
    spec = load_spec(write_dataset(tmp_path / "pets", labels(*classes), names))
    (error, *_) = check_dataset(spec).errors
    assert ("count from 1. Subtract 1 from each class." in error) == from_one, error
    with pytest.raises(UserError) as caught:
        build_index(spec, "train")
    assert str(caught.value).startswith(error), "a run says the same"


def test_one_wrong_name_is_one_error_that_says_what_was_meant(tmp_path: Path) -> None:
    for number in range(9):
        write_voc(tmp_path / "voc", str(number), voc_object("Raccoon"), voc_object("dog"))
    (tmp_path / "voc.yaml").write_text("path: voc\ntrain: Annotations\nval: Annotations\nnames: [RACCOON, dog]\n")
    (error, _) = check(tmp_path / "voc.yaml").errors
    assert error.startswith("Annotations/0.xml:4: class 'Raccoon', but voc.yaml names 2 classes.")
    assert "Did you mean 'RACCOON'? There are 9 such rows; the next: Annotations/1.xml:4," in error


def test_names_and_classes_without_objects(tmp_path: Path) -> None:
    spec = load_spec(write_dataset(tmp_path / "pets", labels(0, 2), "[cat, dog, Cat, CAT, cow]"))
    found = check_dataset(spec)
    case, without = found.notes
    assert case.startswith("pets.yaml: the classes 'cat' and 'Cat' and 'CAT' differ only in case")
    assert without == "train: 3 classes without an object: 'dog', 'CAT', 'cow'"
    assert not check_dataset(spec, single_cls=True).notes
