"""A label file for each image, under a name of its own; COCO's numbering and its results file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.deploy.inference.result_files import (
    COCO_IDS,
    COCO_NAMES,
    coco_category_ids,
    coco_image_ids,
    output_stems,
    save_coco_results,
    save_txt,
)
from tessera.utils.evaluation.matching import Matches
from tessera.utils.types import CocoIds, Detections
from tests.utils.evaluation.made_images import share


def detections(n: int = 2) -> Detections:
    boxes = torch.tensor([[10.0, 20.0, 30.0, 60.0], [0.0, 0.0, 100.0, 200.12345]])[:n]
    return Detections(boxes, torch.tensor([0.875, 0.1234567])[:n], torch.tensor([3, 0])[:n])


@pytest.mark.parametrize(
    ("paths", "stems"),
    [
        ([], []),
        (["/a/1.jpg", "/b/2.jpg"], ["1", "2"]),
        (
            ["/data/cam1/0001.jpg", "/data/cam2/0001.jpg", "/data/x/../cam2/7.v2.png"],
            ["cam1/0001", "cam2/0001", "cam2/7.v2"],
        ),
        (["/d/1.jpg", "/d/1.png"], ["1.jpg", "1.png"]),
        (["/d/a/IMG.jpg", "/d/b/img.jpg"], ["a/IMG", "b/img"]),
        (["/d/a/1.jpg", "/d/A/1.jpg", "/d/a/1.jpg"], ["a/1.jpg", "A/1.jpg-2", "a/1.jpg-3"]),
    ],
)
def test_output_stems(paths: list[str], stems: list[str]) -> None:
    assert output_stems([Path(path) for path in paths]) == stems


def test_rows_are_fractions_of_the_image_and_replace_those_before(tmp_path: Path) -> None:
    target = save_txt(tmp_path / "labels", "img", detections(), (200, 100), save_conf=True)
    assert target == tmp_path / "labels" / "img.txt"
    assert target.read_text() == "3 0.2 0.2 0.2 0.2 0.875\n0 0.5 0.500309 1 1.00062 0.123457\n"
    save_txt(tmp_path / "labels", "img", detections(1), (200, 100), save_conf=False)
    assert target.read_text() == "3 0.2 0.2 0.2 0.2\n"
    save_txt(tmp_path / "labels", "img", detections(0), (200, 100), save_conf=False)
    assert target.read_text() == ""


def found_in(*counts: int, ranks: int = 1) -> Matches:
    """Matches of images with so many detections, gathered from ranks."""
    nothing = np.zeros((0, 4), np.float32), np.zeros(0, np.int32)
    images = [(detections(count), *nothing) for count in counts]
    return Matches.joined([share(images, range(r, len(images), ranks)) for r in range(ranks)])


def test_ids() -> None:
    assert len(COCO_NAMES) == len(COCO_IDS) == len(set(COCO_NAMES)) == 80
    known = {"person": 1, "stop sign": 13, "backpack": 27, "suitcase": 33, "bowl": 51, "tv": 72, "toothbrush": 90}
    assert known.items() <= dict(zip(COCO_NAMES, COCO_IDS, strict=True)).items()
    assert coco_category_ids(COCO_NAMES) == COCO_IDS
    assert coco_category_ids(COCO_NAMES[::-1]) == tuple(range(80))


def test_image_ids() -> None:
    assert coco_image_ids(["000000000139", "7"]) == [139, 7]
    assert coco_image_ids(["000000000139", "cam1/7", "x"]) == [139, "cam1/7", "x"]
    assert coco_image_ids(["1", "01"]) == ["1", "01"]
    assert coco_image_ids(["²", "-3"]) == ["²", "-3"]


@pytest.mark.parametrize("ranks", [1, 2, 9])
def test_file_does_not_depend_on_the_ranks(tmp_path: Path, ranks: int) -> None:
    save_coco_results(tmp_path / "p.json", found_in(2, 1, 0, ranks=ranks), CocoIds((139, "x", "y"), COCO_IDS))
    assert json.loads((tmp_path / "p.json").read_text()) == [
        {"image_id": 139, "category_id": 4, "bbox": [10, 20, 20, 40], "score": 0.875},
        {"image_id": 139, "category_id": 1, "bbox": [0, 0, 100, 200.12344], "score": 0.1234567},
        {"image_id": "x", "category_id": 4, "bbox": [10, 20, 20, 40], "score": 0.875},
    ]
    save_coco_results(tmp_path / "p.json", found_in(0), CocoIds((0,), ()))
    assert json.loads((tmp_path / "p.json").read_text()) == []
