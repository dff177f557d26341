"""What Tessera writes, read by the packages of labelling tools: Datumaro and Label Studio's SDK.

They are no dependencies, and bring another OpenCV: .ci/run installs them into a folder of their own, and
TESSERA_TEST_LABEL_TOOLS names another one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tessera.commands.convert import run
from tests.data.conversion.test_round_trips import coco
from tests.data.make import write_dataset, write_image
from tests.utils.inference.test_prelabels import frame, write

pytestmark = pytest.mark.slow

FOLDER = os.environ.get("TESSERA_TEST_LABEL_TOOLS", str(Path.home() / ".cache/tessera-tests/label-tools"))
PYTHON = Path(FOLDER) / "bin" / "python"
PROGRAM = Path(__file__).with_name("label_tools_program.py")
FOUND = [['a "big" <truck>', 10, 12, 40, 36, False], ["car", 2.25, 3, 20, 30.5, False]]


def read(kind: str, path: Path) -> Any:
    """What a package found."""
    if not PYTHON.is_file():
        pytest.skip(f"no {PYTHON} with datumaro and label-studio-sdk")
    done = subprocess.run([str(PYTHON), str(PROGRAM), kind, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["cvat", "coco", "label-studio"])
def test_prelabels(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "annotations"  # where Datumaro looks for COCO's
    folder.mkdir()
    write(folder, kind, frame("a.jpg", "a.jpg"), frame("b.jpg", "b.jpg"))
    for name in ("a.jpg", "b.jpg"):
        write_image((folder / "images" if kind == "cvat" else tmp_path / "images" / "train") / name, (40, 80))
    if kind == "label-studio":
        assert read(kind, folder) == [[], []], "no errors"
    elif kind == "coco":
        (folder / "predictions.coco.json").rename(folder / "instances_train.json")
        assert read(kind, tmp_path) == [["a", FOUND], ["b", FOUND]]
    else:
        assert read(kind, folder / "predictions.cvat.xml") == [["a", FOUND], ["b", FOUND]]


@pytest.mark.parametrize("kind", ["coco", "voc"])
def test_converted_datasets(tmp_path: Path, kind: str) -> None:
    """With crowds, difficult objects and pictures in folders; with copies, since Datumaro follows no links."""
    yaml = coco(tmp_path)
    for file in tmp_path.glob("*.json"):
        file.write_text(file.read_text().replace('"two"', "2"))
    out = run(data=str(yaml), to=kind, out=str(tmp_path / "out"), copy_images=True).yaml.parent
    rows = [row for _, rows in read(kind, out) for row in rows]
    crowds = [row for row in rows if row[-1]]
    assert len(rows) == 6 and [row[0] for row in rows].count("dog") == 3 and [row[0] for row in crowds] == ["cat"]


def test_converted_label_files(tmp_path: Path) -> None:
    """As Ultralytics has them, which calls the YAML data.yaml."""
    yaml = write_dataset(tmp_path / "pets", {"train/a": "1 0.5 0.5 0.25 0.5\n", "val/b": ""})
    there = run(data=str(yaml), to="coco", out=str(tmp_path / "coco")).yaml
    back = run(data=str(there), to="yolo", out=str(tmp_path / "yolo"), copy_images=True).yaml
    shutil.move(back, back.with_name("data.yaml"))
    assert read("yolo", back.parent) == [["a", [["dog", 24, 12, 40, 36, False]]], ["b", []]]
