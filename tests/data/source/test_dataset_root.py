"""Dataset roots: downloads and generated datasets, and no writes outside the datasets directory."""

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

from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.deploy.foreign import synthetic_shapes
from tessera.utils.errors import UserError
from tessera.utils.types import Archive
from tests.at_once import at_once
from tests.data.source.made_yaml import BODY, build, dataset, refuse, write


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


@pytest.mark.parametrize("path", ["", "path: made\n"])
def test_a_dataset_of_absolute_paths_needs_no_working_directory(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dataset(tmp_path / "made")
    folder = tmp_path if path else made
    (folder / "train.txt").write_text("".join(f"{image}\n" for image in sorted((made / "images").rglob("*.*"))))
    yaml = write(folder / "a.yaml", path + BODY.replace("images/train", str(folder / "train.txt"), 1))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert len(build_index(load_spec(yaml), "train"))


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
    (tmp_path / "site" / "labels.zip").unlink()  # has been unpacked: not requested again
    pack(tmp_path / "site" / "images.zip", made, "", "images")
    assert len(build(yaml, "val").classes) == 1


def test_download_by_several_at_once(tmp_path: Path, site: str) -> None:
    pack(tmp_path / "site" / "pets.zip", dataset(tmp_path / "made"), "pets/")
    yaml = write(tmp_path / "a.yaml", f"path: pets\n{BODY}download: {site}/pets.zip\n")
    roots = at_once([lambda: load_spec(yaml).root] * 4)
    assert roots == [tmp_path / "datasets" / "pets"] * 4


def test_download_of_something_else(tmp_path: Path, site: str) -> None:
    pack(tmp_path / "site" / "a.zip", dataset(tmp_path / "made"), "cats/", "labels")
    refuse(tmp_path, f"path: pets\n{BODY}download: {site}/a.zip\n", "hold cats, but not train: images/train")
    assert not (tmp_path / "datasets" / "pets").exists()


@pytest.mark.parametrize(
    ("place", "what"),
    [("pets/notes.txt", "exists, but has none of images/train"), ("pets", "cannot be downloaded to .*Not a directory")],
)
def test_download_does_not_touch_what_is_there(tmp_path: Path, place: str, what: str) -> None:
    write(tmp_path / "datasets" / place, "mine")
    refuse(tmp_path, f"path: pets\n{BODY}download: http://127.0.0.1:9/a.zip\n", what)
    assert (tmp_path / "datasets" / place).read_text() == "mine"


def test_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = partial(synthetic_shapes.write_shapes, train=2, val=20)
    monkeypatch.setattr(synthetic_shapes, "write_shapes", few)
    spec = load_spec("shapes.yaml")
    assert spec.root == tmp_path / "datasets" / "shapes"
    before = spec.root.stat().st_ino
    assert load_spec("shapes") == spec and spec.root.stat().st_ino == before
    index = build_index(spec, "val")
    assert len(index) == 20 and not index.problems and set(index.classes.tolist()) == set(range(6))


@pytest.mark.parametrize("stated", ["{tmp}/lib/site-packages", "~/site-packages", "{tmp}/datasets/../lib", ".", ".."])
@pytest.mark.parametrize("obtain", ["download: {site}/pets.zip", "generate: shapes"])
def test_nothing_is_planted_outside_the_folder_of_datasets(
    tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch, stated: str, obtain: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    pack(tmp_path / "site" / "pets.zip", dataset(tmp_path / "made"), "")
    before = sorted(tmp_path.rglob("*"))
    refuse(
        tmp_path / "yamls",
        f"path: {stated.format(tmp=tmp_path)}\n{BODY}{obtain.format(site=site)}\n",
        r"a\.yaml:1: path: .* only into folders below .*TESSERA_DATASETS",
    )
    (tmp_path / "yamls" / "a.yaml").unlink()
    (tmp_path / "yamls").rmdir()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("stated", ["out/pets", "{tmp}/datasets/out/pets", "{tmp}/datasets/gone", "out"])
def test_a_link_out_of_the_folder_of_datasets_is_not_followed(tmp_path: Path, site: str, stated: str) -> None:
    pack(tmp_path / "site" / "pets.zip", dataset(tmp_path / "made"), "")
    (tmp_path / "lib").mkdir()
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "out").symlink_to(tmp_path / "lib")
    (tmp_path / "datasets" / "gone").symlink_to(tmp_path / "missing")
    text = f"path: {stated.format(tmp=tmp_path)}\n{BODY}download: {site}/pets.zip\n"
    refuse(tmp_path, text, "only into folders below .*TESSERA_DATASETS")
    assert not list((tmp_path / "lib").iterdir()) and not (tmp_path / "missing").exists()
