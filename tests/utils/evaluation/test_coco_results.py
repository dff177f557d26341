"""COCO's numbering and its results file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.utils.evaluation.coco_results import (
    COCO_IDS,
    COCO_NAMES,
    coco_category_ids,
    coco_image_ids,
    save_coco_results,
)
from tessera.utils.evaluation.matches import Matches
from tessera.utils.types import CocoIds
from tests.utils.evaluation.made_images import Image, make_image, share


def image(n: int) -> Image:
    boxes = [[10.0, 20.0, 30.0, 60.0], [0.0, 0.0, 100.0, 200.12345]]
    return make_image(boxes[:n], [0.875, 0.1234567][:n], [3, 0][:n], [], [])


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
    images = [image(n) for n in (2, 1, 0)]
    found = Matches.joined([share(images, range(r, 3, ranks)) for r in range(ranks)])
    save_coco_results(tmp_path / "predictions.json", found, CocoIds((139, "x", "y"), COCO_IDS))
    assert json.loads((tmp_path / "predictions.json").read_text()) == [
        {"image_id": 139, "category_id": 4, "bbox": [10, 20, 20, 40], "score": 0.875},
        {"image_id": 139, "category_id": 1, "bbox": [0, 0, 100, 200.12344], "score": 0.1234567},
        {"image_id": "x", "category_id": 4, "bbox": [10, 20, 20, 40], "score": 0.875},
    ]


def test_no_detections_are_valid_json(tmp_path: Path) -> None:
    save_coco_results(tmp_path / "p.json", share([image(0)]), CocoIds((0,), ()))
    assert json.loads((tmp_path / "p.json").read_text()) == []
