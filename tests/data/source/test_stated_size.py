"""Labels that state another image size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.data.source.annotations.test_voc import voc, voc_object
from tests.data.source.made_yaml import build, coco_set, write

WIDE, HIGH = (10, 5, 50, 25), (10, 5, 25, 50)  # corners in pixels
SHOWN = "its boxes fit the displayed image and are used"
TURNED = "after applying its EXIF orientation"


@pytest.mark.parametrize("form", ["coco", "voc"])
@pytest.mark.parametrize(
    "case",
    [
        ((64, 40), 1, WIDE, True, ""),
        ((65, 39), 1, WIDE, True, "made for 65 x 39 pixels, but the image has 64 x 40, which is off by one"),
        ((40, 64), 1, WIDE, True, f"width and height are swapped; {SHOWN}"),
        ((40, 64), 1, HIGH, False, "but the image has 64 x 40: width and height are swapped"),
        ((32, 20), 1, WIDE, False, "made for 32 x 20 pixels, but the image has 64 x 40"),
        ((40, 64), 6, HIGH, True, ""),
        ((64, 40), 6, WIDE, False, TURNED),
        ((64, 40), 6, HIGH, True, f"{TURNED}; {SHOWN}"),
        ((64, 40), 6, (10, 5, 25, 25), False, TURNED),
    ],
)
def test_stated_size(tmp_path: Path, form: str, case: tuple[tuple[int, int], int, tuple[int, ...], bool, str]) -> None:
    (width, height), orientation, (left, top, right, bottom), is_used, said = case
    exif = Image.Exif()
    exif[0x0112] = orientation
    (tmp_path / "images").mkdir()
    for name, turned in (("a.jpg", exif), ("b.jpg", Image.Exif())):
        Image.new("RGB", (64, 40)).save(tmp_path / "images" / name, exif=turned)
    if form == "coco":
        boxes = {"a.jpg": [left, top, right - left, bottom - top], "b.jpg": [1, 2, 3, 4]}
        yaml = coco_set(tmp_path, {name: [{"category_id": 1, "bbox": box}] for name, box in boxes.items()}, {1: "cat"})
        content = json.loads((tmp_path / "set.json").read_text())
        content["images"][0] |= {"width": width, "height": height}
        write(tmp_path / "set.json", json.dumps(content))
    else:
        size = f"<size><width>{width}</width><height>{height}</height></size>"
        for name, stated, box in (("a", size, f"{left + 1} {top + 1} {right} {bottom}"), ("b", "", "2 3 4 6")):
            (tmp_path / f"images/{name}.xml").write_bytes(voc(voc_object(box=box), size=stated))
        yaml = write(tmp_path / "a.yaml", f"path: {tmp_path}\ntrain: images\nnames: [cat]\n")
    index = build(yaml)
    assert [[left, top, right, bottom]] * is_used + [[1, 2, 4, 6]] == index.boxes_xyxy.round(3).tolist()
    assert len(index.problems) == bool(said) and all(said in line for line in index.problems), index.problems
    assert all(line.endswith("image skipped") != is_used for line in index.problems)
