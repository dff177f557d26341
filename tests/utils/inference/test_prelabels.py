"""Files of `detect.py --save-as`: what labelling tools read, whole or not there."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path, PurePath

import numpy as np
import pytest
from pycocotools.coco import COCO

from tessera.utils.errors import UserError
from tessera.utils.inference.prelabels import DOCUMENTS
from tessera.utils.inference.results import Result
from tessera.utils.inference.sources.frames import Frame
from tests.data.make import write_image
from tests.data.source.built_index import build
from tests.utils.inference.test_outputs import files_of_at_most

NAMES = ("car", 'a "big" <truck>')
BOXES = [[2.25, 3, 20, 30.5], [10, 12, 40, 36]]
NAMES_OF_FILES = ("predictions.coco.json", "label-studio.xml", "predictions.label-studio.json", "predictions.cvat.xml")


def frame(source: str, name: str, media: str = "picture") -> Frame:
    return Frame(np.zeros((40, 80, 3), np.uint8), source, media, PurePath(name))  # type: ignore[arg-type]


def write(folder: Path, kind: str, *frames: Frame, boxes: int = 2) -> None:
    output = DOCUMENTS[kind](folder, NAMES, "best.pt")
    for one in frames:
        found = np.array(BOXES, np.float32)[:boxes], np.array([0.75, 0.5], np.float32)[:boxes], np.arange(boxes)
        output.add(Result(*found, NAMES, one.source, (40, 80), one.media), one, PurePath("unused"))
    assert not any((folder / name).is_file() for name in NAMES_OF_FILES if name.startswith("pred")), "not before"
    output.close()


@pytest.fixture
def frames() -> tuple[Frame, ...]:
    """A picture in a folder, one of that name in another, one of the web, and a frame of a video."""
    same = frame("/one/a b/1.jpg", "a b/1.jpg"), frame("/two/a b/1.jpg", "a b/1.jpg")
    return (*same, frame("https://host/2.jpg?x=1&y", "2.jpg"), frame("street.mp4", "street.mp4", "video"))


def test_coco_by_its_own_reader(tmp_path: Path, frames: tuple[Frame, ...], caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "coco", *frames)
    assert caplog.messages == ["predictions.coco.json: frames of videos and streams are left out: 1."]
    found = COCO(str(tmp_path / "predictions.coco.json"))
    assert [image["file_name"] for image in found.loadImgs(found.getImgIds())] == [
        *("a b/1.jpg", "/two/a b/1.jpg", "2.jpg"),
    ]
    assert {c["id"]: c["name"] for c in found.loadCats(found.getCatIds())} == dict(enumerate(NAMES, 1))
    rows = found.loadAnns(found.getAnnIds(imgIds=[2]))
    assert [(row["bbox"], row["score"], row["category_id"]) for row in rows] == [
        ([2.25, 3, 17.75, 27.5], 0.75, 1),
        ([10, 12, 30, 24], 0.5, 2),
    ]


def test_coco_trains(tmp_path: Path) -> None:
    write(tmp_path, "coco", frame("a.jpg", "sub/a.jpg"))
    write_image(tmp_path / "sub" / "a.jpg", (40, 80))
    (tmp_path / "set.yaml").write_text("train: predictions.coco.json\n")
    index = build(tmp_path / "set.yaml")
    assert index.names == NAMES and index.boxes_xyxy.tolist() == BOXES and not index.problems


def test_tasks_of_label_studio(tmp_path: Path, frames: tuple[Frame, ...]) -> None:
    write(tmp_path, "label-studio", *frames)
    tasks = json.loads((tmp_path / "predictions.label-studio.json").read_text())
    assert [task["data"]["image"] for task in tasks] == [
        "/data/local-files/?d=a%20b/1.jpg",
        "/data/local-files/?d=/two/a%20b/1.jpg",
        "https://host/2.jpg?x=1&y",
    ]
    (prediction,) = tasks[0]["predictions"]
    assert (prediction["model_version"], prediction["score"]) == ("best.pt", 0.5)
    value = prediction["result"][0]["value"]
    assert value.pop("rectanglelabels") == ["car"]
    assert value == {"x": 2.8125, "y": 7.5, "width": 22.1875, "height": 68.75, "rotation": 0}
    view = ElementTree.parse(tmp_path / "label-studio.xml").getroot()
    assert [label.get("value") for label in view.iter("Label")] == list(NAMES)


def test_images_of_cvat(tmp_path: Path, frames: tuple[Frame, ...]) -> None:
    write(tmp_path, "cvat", *frames)
    root = ElementTree.parse(tmp_path / "predictions.cvat.xml").getroot()
    assert root.findtext("version") == "1.1" and [label.findtext("name") for label in root.iter("label")] == list(NAMES)
    assert [(image.get("id"), image.get("name")) for image in root.iter("image")] == [
        *(("0", "a b/1.jpg"), ("1", "/two/a b/1.jpg"), ("2", "2.jpg")),
    ]
    boxes = [[float(box.get(key, "")) for key in ("xtl", "ytl", "xbr", "ybr")] for box in root.iter("box")]
    assert boxes == BOXES * 3 and [box.get("label") for box in root.iter("box")] == [*NAMES] * 3


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_nothing_found_and_nothing_read_are_whole_files(tmp_path: Path, kind: str) -> None:
    for number, count in enumerate((0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, kind, *[frame("odd\udcff\x1b.jpg", "odd\udcff\x1b.jpg")] * count, boxes=0)
        (path,) = folder.glob("predictions.*")
        text = path.read_text()
        read = ElementTree.fromstring(text) if path.suffix == ".xml" else json.loads(text)
        assert read is not None and ("odd" in text) == bool(count)


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_what_does_not_fit_is_not_there(tmp_path: Path, kind: str) -> None:
    output = DOCUMENTS[kind](tmp_path, NAMES, "best.pt")
    one = frame("a.jpg", "a.jpg")
    result = Result(np.array(BOXES, np.float32), np.ones(2, np.float32), np.arange(2), NAMES, "a", (40, 80))
    with pytest.raises(UserError, match="cannot be written"), files_of_at_most(1):
        output.add(result, one, PurePath("a"))
    output.close()
    assert [path.name for path in tmp_path.iterdir() if path.name != "label-studio.xml"] == []
