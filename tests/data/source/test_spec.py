"""Dataset YAMLs: where they and their datasets are found, what is refused, what is downloaded and generated."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from data.source import spec as module
from data.source.index import build_index
from data.source.shapes import NAMES, write_shapes
from data.source.spec import load_spec
from tests.at_once import at_once
from tests.data.make import write_dataset, write_image
from utils.environment import REPO
from utils.errors import ConfigError, UserError
from utils.types import Archive

BODY = "train: images/train\nval: images/val\nnames: [cat, dog]\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def dataset(root: Path) -> Path:
    """A folder with an image in train and in val."""
    for split in ("train", "val"):
        write_image(root / "images" / split / "a.jpg")
        write(root / "labels" / split / "a.txt", "0 0.5 0.5 0.2 0.2\n")
    return root


def refuse(path: Path, text: str, what: str) -> None:
    write(path / "a.yaml", text)
    with pytest.raises(UserError, match=what):
        load_spec(path / "a.yaml")


@pytest.mark.parametrize("name", ["coco128", "coco", "VOC", "shapes"])
def test_the_repository_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_find_root", lambda plan, stated: Path("/there") / stated)
    spec = load_spec(name)
    assert spec == load_spec(f"{name}.yaml") == load_spec(REPO / "data" / f"{name}.yaml")
    assert spec.nc == {"coco128": 80, "coco": 80, "VOC": 20, "shapes": 6}[name]
    assert {"train", "val"} <= set(spec.splits)


def test_shapes_names_are_those_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_find_root", lambda plan, stated: Path("/there") / stated)
    assert load_spec("shapes").names == NAMES


def test_unknown_yaml_lists_places_and_choices() -> None:
    with pytest.raises(ConfigError) as caught:
        load_spec("coco182.yaml")
    assert "Did you mean 'coco128.yaml'?" in str(caught.value)
    assert str(REPO / "data" / "coco182.yaml") in str(caught.value)
    assert "VOC.yaml" in str(caught.value)


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


def test_first_place_wins_and_an_empty_folder_is_none(tmp_path: Path) -> None:
    yaml = write(tmp_path / "a.yaml", f"path: pets\n{BODY}")
    (tmp_path / "pets").mkdir()
    root = dataset(tmp_path / "datasets" / "pets")
    assert load_spec(yaml).root == root
    assert load_spec(yaml).root != dataset(tmp_path / "pets") == load_spec(yaml).root


def test_nowhere_lists_what_was_tried(tmp_path: Path) -> None:
    yaml = write(tmp_path / "a.yaml", f"path: pets\n{BODY}")
    with pytest.raises(UserError) as caught:
        load_spec(yaml)
    for place in (tmp_path, Path.cwd(), REPO, tmp_path / "datasets"):
        assert f"{place / 'pets'} (no such folder)" in str(caught.value)


def test_without_path_the_yaml_lies_in_the_dataset(tmp_path: Path) -> None:
    root = dataset(tmp_path / "pets")
    spec = load_spec(
        write(root / "data.yaml", "train: ../images/train\nval: ../images/val\nnames: [cat]\nroboflow: {v: 1}\n")
    )
    assert spec.splits["val"] == (root / "images/val",)
    assert spec.name == "data"


def test_entries(tmp_path: Path) -> None:
    root = dataset(tmp_path / "pets")
    text = f"path: {root}\ntrain: [images/train, 'images/v*']\nval: {root}/images/val\ntest:\n"
    text += "names: {0: cat, 1: dog}\nnc: 2\n"
    spec = load_spec(write(tmp_path / "a.yaml", text))
    assert spec.splits == {"train": (root / "images/train", root / "images/v*"), "val": (root / "images/val",)}
    assert spec.names == ("cat", "dog")


def test_byte_order_mark(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": "0 0.5 0.5 0.2 0.2"})
    yaml.write_bytes(b"\xef\xbb\xbf" + yaml.read_bytes())
    assert load_spec(yaml).names == ("cat", "dog")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("train: a\nnames: [cat\nval: b\n", r"a\.yaml:3: not valid YAML"),
        ("- a\n- b\n", "found list, expected keys"),
        ("", "found nothing"),
        ("train: a\nval: b\n", "names: found None"),
        ("train: a\nnames: cat\n", "names: found 'cat'"),
        ("train: a\nnames: {0: cat, 2: dog}\n", "found the key 2"),
        ("train: a\nnames: {1: cat, 2: dog}\n", "found the key 2"),
        ("train: a\nnames: {cat: 0}\n", "found the key 'cat'"),
        ("train: a\nnames: [no, yes]\n", "class 0 is False"),
        ("train: a\nnames: [cat, cat]\n", "'cat' is the name of classes 0 and 1"),
        ("train: a\nnames: [cat, dog]\nnc: 3\n", "nc is 3, but names has 2"),
        ("train: a\nnames: [cat, dog]\nnc: true\n", "nc is True"),
        ("names: [cat]\n", "none of train, val and test"),
        ("train: 3\nnames: [cat]\n", "train: found 3"),
        ("trian: a\nval: a\nnames: [cat]\n", "unknown key 'trian'. Did you mean 'train'"),
        ("train: a\nname: [cat]\n", "unknown key 'name'. Did you mean 'names'"),
        ("path: [a]\ntrain: a\nnames: [cat]\n", r"path: found \['a'\]"),
        ("train: a\nnames: [cat]\ngenerate: art\n", "generate: found 'art'"),
        ("train: !!python/object/apply:os.system ['touch x']\nnames: [cat]\n", "not valid YAML"),
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
@pytest.mark.parametrize("present", [False, True])
def test_scripts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, present: bool) -> None:
    monkeypatch.chdir(tmp_path)
    if present:
        dataset(tmp_path / "pets")
    refuse(tmp_path, f"path: pets\n{BODY}download: {script}\n", "Scripts are refused, never run")
    assert not (tmp_path / "pwned").exists()


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A web server over tmp_path/site."""
    (tmp_path / "site").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(tmp_path / "site"))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def pack(path: Path, folder: Path, inside: str, part: str = "") -> None:
    """A zip of folder/part, its names starting with `inside`."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for item in sorted((folder / part).rglob("*")):
            if item.is_file():
                file.write(item, inside + str(item.relative_to(folder)))
    path.write_bytes(content.getvalue())


@pytest.mark.parametrize("inside", ["pets/", ""])
def test_download(tmp_path: Path, site: str, inside: str) -> None:
    pack(tmp_path / "site" / "pets.zip", dataset(tmp_path / "made"), inside)
    yaml = write(tmp_path / "a.yaml", f"path: pets\n{BODY}download: {site}/pets.zip\n")
    spec = load_spec(yaml)
    assert spec.root == tmp_path / "datasets" / "pets"
    assert spec.download == (Archive(f"{site}/pets.zip"),)
    assert len(build_index(spec, "train").classes) == 1
    assert [path.name for path in (tmp_path / "datasets").iterdir()] == ["pets"]
    (tmp_path / "site" / "pets.zip").unlink()
    assert load_spec(yaml) == spec


def test_download_in_parts_appears_whole(tmp_path: Path, site: str) -> None:
    made = dataset(tmp_path / "made")
    pack(tmp_path / "site" / "labels.zip", made, "pets/", "labels")
    text = f"path: pets\n{BODY}download:\n- {site}/labels.zip\n- {{url: '{site}/images.zip', into: pets}}\n"
    yaml = write(tmp_path / "a.yaml", text)
    with pytest.raises(UserError, match="404"):
        load_spec(yaml)
    assert not (tmp_path / "datasets" / "pets").exists()
    (tmp_path / "site" / "labels.zip").unlink()  # has been unpacked: not asked for again
    pack(tmp_path / "site" / "images.zip", made, "", "images")
    assert len(build_index(load_spec(yaml), "val").classes) == 1


def test_download_by_several_at_once(tmp_path: Path, site: str) -> None:
    pack(tmp_path / "site" / "pets.zip", dataset(tmp_path / "made"), "pets/")
    yaml = write(tmp_path / "a.yaml", f"path: pets\n{BODY}download: {site}/pets.zip\n")
    roots = at_once([lambda: load_spec(yaml).root] * 4)
    assert roots == [tmp_path / "datasets" / "pets"] * 4


def test_download_of_something_else(tmp_path: Path, site: str) -> None:
    pack(tmp_path / "site" / "a.zip", dataset(tmp_path / "made"), "cats/", "labels")
    refuse(tmp_path, f"path: pets\n{BODY}download: {site}/a.zip\n", "hold cats, but not train: images/train")
    assert not (tmp_path / "datasets" / "pets").exists()


def test_download_does_not_touch_an_unfinished_folder(tmp_path: Path) -> None:
    write(tmp_path / "datasets" / "pets" / "notes.txt", "mine")
    refuse(tmp_path, f"path: pets\n{BODY}download: http://127.0.0.1:9/a.zip\n", "exists, but has none of images/train")


def test_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._GENERATORS, "shapes", partial(write_shapes, train=2, val=20))
    spec = load_spec("shapes.yaml")
    assert spec.root == tmp_path / "datasets" / "shapes"
    before = spec.root.stat().st_ino
    assert load_spec("shapes") == spec and spec.root.stat().st_ino == before
    index = build_index(spec, "val")
    assert len(index) == 20 and not index.problems and set(index.classes.tolist()) == set(range(6))
