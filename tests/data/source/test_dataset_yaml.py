"""Dataset YAMLs: lookup of files and datasets, and mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.data.source.dataset_root import DatasetRoot
from tessera.data.source.dataset_yaml import load_spec
from tessera.deploy.foreign.synthetic_shapes import NAMES
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.flags.program import HOME
from tests.data.source.made_yaml import BODY, dataset, refuse, write

NUMBERS = ("007", "010", "12:30", "1_000", "1.10", "0x1F", "0b1", "1e3", "-5", "+5", ".5", "02146", "3")


@pytest.mark.parametrize("form", ["[{}]", "{{{}}}"])
def test_names_that_yaml_takes_for_numbers_stay_as_written(tmp_path: Path, form: str) -> None:
    """YAML 1.1 has octal, binary, hexadecimal and base-60 numbers, and underscores in them."""
    rows = NUMBERS if form == "[{}]" else [f"{number}: {name}" for number, name in enumerate(NUMBERS)]
    root = dataset(tmp_path / "pets")
    body = f"path: {root}\ntrain: images/train\nval: images/val\nnames: {form.format(', '.join(rows))}\n"
    assert load_spec(write(tmp_path / "a.yaml", body)).names == NUMBERS
    padded = "".join(f"  {number:03}: name {number}\n" for number in range(12))
    assert (
        load_spec(write(tmp_path / "c.yaml", f"path: {root}\ntrain: images/train\nkpt_shape:\nnames:\n{padded}")).nc
        == 12
    )
    some = load_spec(write(tmp_path / "b.yaml", f"{body}classes: {{a: [007, 12], b: 1.10}}\nignore: [08:15]\n"))
    assert (some.names, some.parts, some.ignore) == (("a", "b"), (("007", "3"), ("1.10",)), ("08:15",))


@pytest.mark.parametrize("name", ["coco128", "coco", "VOC", "shapes"])
def test_the_repository_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DatasetRoot, "locate", lambda place: Path("/there") / place.stated)
    spec = load_spec(name)
    assert spec == load_spec(f"{name}.yaml") == load_spec(HOME / "data" / f"{name}.yaml")
    assert spec.nc == {"coco128": 80, "coco": 80, "VOC": 20, "shapes": 6}[name]
    assert {"train", "val"} <= set(spec.splits)
    assert name != "shapes" or spec.names == NAMES, "those rendered"


def test_unknown_yaml_lists_places_and_choices() -> None:
    with pytest.raises(ConfigError) as caught:
        load_spec("coco182.yaml")
    assert "Did you mean 'coco128.yaml'?" in str(caught.value)
    assert str(HOME / "data" / "coco182.yaml") in str(caught.value)
    assert "VOC.yaml" in str(caught.value)


@pytest.mark.parametrize("name", ["a.json", "train.txt", "obj.data"])
def test_what_goes_into_a_yaml_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: found .*, expected a dataset YAML.* under its `train:`"):
        load_spec(write(tmp_path / name, "{}"))


def test_an_archive_is_unpacked_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set\.zip: found an archive, expected a dataset YAML\. Unpack it"):
        load_spec(write(tmp_path / "set.zip", "PK"))


def test_a_folder_stands_for_its_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = dataset(tmp_path / "pets")
    with pytest.raises(ConfigError, match="found a folder without a YAML, expected a dataset YAML"):
        load_spec(root)
    one = write(root / "pets.yaml", BODY)
    assert load_spec(root).yaml_path == one
    other = write(root / "more.yml", BODY)
    with pytest.raises(ConfigError, match=r"found a folder with 'more\.yml', 'pets\.yaml', expected a dataset YAML"):
        load_spec(root)
    assert load_spec(write(root / "data.yaml", BODY)).yaml_path == load_spec(root).yaml_path != other
    monkeypatch.chdir(root)
    assert load_spec(".").yaml_path == root / "data.yaml"


@pytest.mark.parametrize("place", ["beside", "cwd", "datasets", "yolov5"])
def test_relative_path_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    base = {"beside": "yamls", "cwd": "cwd", "datasets": "datasets", "yolov5": "datasets"}[place]
    root = dataset(tmp_path / base / "pets")
    stated = "../datasets/pets" if place == "yolov5" else "pets"
    spec = load_spec(write(tmp_path / "yamls" / "a.yaml", f"path: {stated}\n{BODY}"))
    assert spec.root == root
    assert spec.splits == {"train": (root / "images/train",), "val": (root / "images/val",)}


def test_nowhere_lists_what_was_tried(tmp_path: Path) -> None:
    yaml = write(tmp_path / "a.yaml", f"path: pets\n{BODY}")
    with pytest.raises(UserError) as caught:
        load_spec(yaml)
    for place in (tmp_path, Path.cwd(), HOME, tmp_path / "datasets"):
        assert f"{place / 'pets'} (no such folder)" in str(caught.value)


def test_entries(tmp_path: Path) -> None:
    root = dataset(tmp_path / "pets")
    text = f"path: {root}\ntrain: [images/train, 'images/v*']\nval: {root}/images/val\ntest:\n"
    text += f"names: {{0: cat, 1: dog}}\nnc: 2\nvalid: {root}/images/val\ntrainer: me\n"
    spec = load_spec(write(tmp_path / "a.yaml", text))
    assert spec.splits == {"train": (root / "images/train", root / "images/v*"), "val": (root / "images/val",)}
    assert spec.names == ("cat", "dog")


def test_names_of_every_script(tmp_path: Path) -> None:
    """With joiners, soft hyphens and marks of direction; a byte-order mark before one is no part of it."""
    dataset(tmp_path / "pets")
    names = ("می\u200cروم", "\u200eabc\u200f", "Haus\u00adtür", "a\ufeffb", "naïve")
    quoted = ", ".join(f'"{name}"' for name in ("\ufeffcat", *names))
    yaml = write(tmp_path / "a.yaml", f"path: pets\ntrain: images/train\nnames: [{quoted}]\n")
    assert load_spec(yaml).names == ("cat", *names)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("train: a\nval: b\n", "names: found None"),
        ("train: a\nnames: {0: cat, 2: dog, 5: cow}\n", "found the key 5, but none for class 1, expected"),
        ("train: a\nnames: {cat: 0}\n", "found the key 'cat'"),
        ("train: a\nnames: [no, yes]\n", "class 0 is False"),
        ("train: a\nnames: [2024-01-01]\n", "Put it in quotes"),
        ("train: a\nnames: [[cat], dog]\n", r"class 0 is \['cat'\], expected a name. Write a text"),
        ("train: a\nnames: [cat]\nkpt_shape: [17, 4]\n", r"kpt_shape: found \[17, 4\]"),
        ("train: a\nnames: {0: cat, '0': dog}\n", "found the key 0 twice"),
        ('train: a\nnames: ["cat\\e[31m"]\n', r"class 0 is 'cat\\x1b\[31m', expected .* without control"),
        *((f'train: a\nnames: ["a\\u{c}b"]\n', "without control") for c in ("0085", "2028", "2029", "0009", "000a")),
        ('train: a\nnames: ["\\uFEFF"]\n', "class 0 is '', expected a name"),
        ('train: a\nnames: ["\\uFEFFcat", cat]\n', "'cat' is the name of classes 0 and 1"),
        (f"train: a\nnames: [{'x' * 201}]\n", "of at most 200 characters"),
        ('train: "a\\0b"\nnames: [cat]\n', "none holds a NUL"),
        (f"train: a\npath: {'x' * 256}\nnames: [cat]\n", r"a\.yaml:2: path: found 'xxx.* at most 255"),
        ("train: a\npath: ~nobody-here/a\nnames: [cat]\n", r"a\.yaml:2: path: found '~nobody-here/a', whose home"),
        (f"train: a\npath: {'d/' * 2045}\nnames: [cat]\n", "at most 4,095 bytes"),
        ("train: a\nnames: [cat, dog]\nnc: 3\n", "nc is 3, but names has 2"),
        ("names: [cat]\n", "none of train, val and test"),
        ("train: 3\nnames: [cat]\n", "train: found 3"),
        ("train: https://x.org/a.zip\nnames: [cat]\n", "'https://x.org/a.zip', expected a folder.* as `download:`"),
        ("trian: a\nval: a\nnames: [cat]\n", "unknown key 'trian'. Did you mean 'train'"),
        *(
            (f"train: a\n{key}: b\nnames: [cat]\n", f"a.yaml:2: unknown key '{key}'. Did you mean '{meant}'")
            for key, meant in {"validation": "val", "valid": "val", "vali": "val", "Validation": "val"}.items()
        ),
        ("val: a\ntraining: [b, c]\nnames: [cat]\n", "unknown key 'training'. Did you mean 'train'"),
        ("train: a\nvalidation: 0.2\nnames: [cat]\n", "unknown key 'validation'. Did you mean 'val'"),
        ("train: a\nval: a\nvalid: [b]\nnames: [cat]\n", "a.yaml:3: unknown key 'valid'.* Both are there: remove one"),
        ("train: a\nname: [cat]\n", "unknown key 'name'. Did you mean 'names'"),
        ("train: a\nnames: [cat]\npixels: {range: [9, 0]}\n", r"a\.yaml:3: pixels: found \{'range': \[9, 0\]\}, exp"),
        ("path: [a]\ntrain: a\nnames: [cat]\n", r"path: found \['a'\]"),
        ("train: a\nnames: [cat]\ngenerate: art\n", "generate: found 'art'"),
        ("train: a\nnames: [cat]\ndownload: {url: 'https://a/b.zip', into: ../out}\n", "into: found '../out'"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, what: str) -> None:
    refuse(tmp_path, text, what)


@pytest.mark.parametrize(
    "script",
    [
        "bash data/scripts/get.sh",
        "|\n  import os\n  os.system('touch pwned')",
        "https://host/a.zip; touch pwned",
        "ftp://host/a.zip",
        "[https://host/a.zip, 'touch pwned']",
        "{url: 'https://host/a.zip', run: 'touch pwned'}",
        "3",
    ],
)
def test_scripts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.chdir(tmp_path)
    refuse(tmp_path, f"path: pets\n{BODY}download: {script}\n", "Scripts are refused, never run")
    assert not (tmp_path / "pwned").exists()
