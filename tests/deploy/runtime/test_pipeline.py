"""Tests of tiles: they cover an image, and objects on seams are detected once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tessera.data.feed.image_sizes import Tile, cut
from tessera.deploy.inference.detector import Detector
from tessera.deploy.inference.flags import DetectConfig
from tessera.deploy.runtime.pipeline import image_detector, join
from tessera.models.nms import NmsSettings
from tessera.utils.errors import ConfigError
from tessera.utils.evaluation.network import ImageDetector
from tessera.utils.types import Detections
from tests.deploy.runtime.made_files import detector_of

RULES = NmsSettings(0.25, 0.45)
LEAST = 8  # pixels of an object that are found


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6000), st.integers(1, 400), st.booleans(), st.integers(64, 2000), st.floats(0, 0.8))
def test_each_pixel_is_in_a_tile_and_neighbours_overlap(
    long: int, short: int, lies: bool, tile: int, overlap: float
) -> None:
    height, width = (short, long) if lies else (long, short)
    tiles = cut((height, width), tile, overlap)
    for low, high, side in ((0, 2, width), (1, 3, height)):
        spans = sorted({(each[low], each[high]) for each in tiles})
        assert spans[0][0] == 0 and spans[-1][1] == side
        assert {end - start for start, end in spans} == {min(tile, side)}
        least = min(int(np.ceil(overlap * tile)), tile - 1)
        assert all(end - start >= least for (_, end), (start, _) in pairwise(spans))
    across, down = len({each.left for each in tiles}), len({each.top for each in tiles})
    assert len(set(tiles)) == len(tiles) == across * down, "a full grid"


def test_no_tile_too_many() -> None:
    assert cut((480, 640), 640, 0.2) == [Tile(0, 0, 640, 480)]
    assert [tile.left for tile in cut((640, 1152), 640, 0.2)] == [0, 512]
    assert [tile.left for tile in cut((640, 1153), 640, 0.2)] == [0, 256, 513]


def drawn(size_hw: tuple[int, int], boxes: list[tuple[int, int, int, int]]) -> NDArray[np.uint8]:
    pixels = np.zeros((*size_hw, 3), np.uint8)
    for left, top, right, bottom in boxes:
        pixels[top:bottom, left:right] = 255
    return pixels


Seen = list[NDArray[np.uint8]]


def white_boxes(seen: Seen | None = None, largest: int = 10_000) -> ImageDetector:
    """A detector of white boxes that detects no less than 8 pixels of one, and is surer of large ones.

    `largest`: images with a longer side have nothing in them. `seen` receives the images.
    """

    def find(image: NDArray[np.uint8]) -> Detections:
        if seen is not None:
            seen.append(image)
        _, _, stats, _ = cv2.connectedComponentsWithStats(image[..., 0])
        rows = [row for row in stats[1:].tolist() if min(row[2], row[3]) >= LEAST and max(image.shape) <= largest]
        boxes = torch.tensor([[x, y, x + w, y + h] for x, y, w, h, _ in rows], dtype=torch.float32).reshape(-1, 4)
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
        scores = 0.3 + 0.69 * areas / (areas + 1e4)
        order = scores.argsort(descending=True)
        return Detections(boxes[order], scores[order], torch.zeros(len(order), dtype=torch.int64))

    return detector_of(find)


def found_in_tiles(pixels: NDArray[np.uint8], tile: int, overlap: float, *, whole: bool = True) -> NDArray[np.float32]:
    """Boxes from top to bottom; `whole`: the whole image shows them too, not its tiles alone."""
    detector = white_boxes() if whole else white_boxes(largest=tile)
    found, _ = image_detector(detector, 64, tile, overlap)(pixels, RULES)
    boxes = found.boxes_xyxy.numpy()
    return boxes[np.lexsort(boxes.T[::-1])]


@pytest.mark.parametrize("whole", [False, True])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_an_object_on_seams_is_one_box(whole: bool, data: st.DataObject) -> None:
    """A cell of a grid holds an object or none: small ones, and ones that several tiles see a part of."""
    cell = data.draw(st.sampled_from([48, 90, 200, 330]))
    rows, columns = data.draw(st.integers(1, 900 // cell)), data.draw(st.integers(1, 1200 // cell))
    boxes = []
    for row in range(rows):
        for column in range(columns):
            width, height = data.draw(st.integers(LEAST, cell - 6)), data.draw(st.integers(LEAST, cell - 6))
            left, top = column * cell + 3 + (cell - 6 - width) // 2, row * cell + 3 + (cell - 6 - height) // 2
            boxes.append((left, top, left + width, top + height))
    pixels = drawn((rows * cell, columns * cell), boxes)
    tile, overlap = data.draw(st.integers(128, 300)), data.draw(st.floats(0.2, 0.6))
    found = found_in_tiles(pixels, tile, overlap, whole=whole)
    expected = np.array(sorted(boxes), np.float32)
    assert len(found) == len(expected)
    assert np.abs(found - expected).max() <= LEAST, "less of it may be missing"


def test_a_small_image_is_not_split_and_boxes_stay_inside() -> None:
    pixels, seen = drawn((300, 400), [(10, 10, 50, 60)]), Seen()
    found, _ = image_detector(white_boxes(seen), 64, 640)(pixels, RULES)
    assert len(seen) == 1 and seen[0] is pixels and len(found) == 1
    assert found_in_tiles(drawn((700, 700), [(0, 0, 700, 700)]), 256, 0.25).tolist() == [[0, 0, 700, 700]]


LEFT, RIGHT = Tile(0, 0, 640, 640), Tile(512, 0, 1152, 640)


def joined(
    left: list[tuple[float, ...]], right: list[tuple[float, ...]], rules: NmsSettings = RULES
) -> list[tuple[list[float], float, int]]:
    """Rows x1, y1, x2, y2, score, class of two tiles, joined."""
    parts = []
    for rows in (left, right):
        table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
        parts.append(Detections(table[:, :4], table[:, 4], table[:, 5].long()))
    found = join([LEFT, RIGHT], parts, (640, 1152), rules)
    scores = [round(score, 4) for score in found.scores.tolist()]
    return list(zip(found.boxes_xyxy.tolist(), scores, found.classes.tolist(), strict=True))


def test_which_detections_are_one_object() -> None:
    """The whole box wins over a surer part."""
    assert joined([(560, 100, 639, 200, 0.9, 0)], [(560, 100, 700, 200, 0.6, 0)]) == [([560, 100, 700, 200], 0.6, 0)]
    left, right = [(560, 100, 620, 200, 0.9, 0)], [(560, 100, 620, 200, 0.6, 1)]
    assert [row[2] for row in joined(left, right)] == [0, 1]
    assert [row[2] for row in joined(left, right, NmsSettings(0.25, 0.45, agnostic=True))] == [0]
    left, right = [(400, 100, 640, 300, 0.9, 0)], [(632, 100, 900, 300, 0.8, 0)]
    assert len(joined(left, right)) == 2, "a neighbour that reaches into the common part"
    large, other, small = (300, 100, 640, 500, 0.9, 0), (512, 100, 800, 500, 0.8, 0), (560, 200, 600, 260, 0.5, 0)
    assert len(joined([large, small], [other])) == len(joined([large], [other, small])) == 2


def test_nothing_and_limits() -> None:
    assert joined([], []) == []
    many = [(10.0 * n, 10, 10.0 * n + 8, 18, 0.3 + n / 100, 0) for n in range(50)]
    assert [row[1] for row in joined(many, [], NmsSettings(0.25, 0.45, max_det=2))] == [0.79, 0.78]


def test_a_detector_takes_tiles() -> None:
    pixels = drawn((640, 1700), [(100, 200, 1600, 400), (630, 10, 660, 40)])
    detector = Detector(white_boxes(), conf_thres=0.25, tile=640, overlap=0.2)
    (result,) = detector(pixels)
    assert sorted(result.boxes_xyxy.tolist()) == [[100, 200, 1600, 400], [630, 10, 660, 40]]
    assert result.size_hw == (640, 1700) and result.scores.tolist() == sorted(result.scores.tolist(), reverse=True)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [({"tile": 31}, "tile: found 31"), ({"tile": -1}, "tile: found -1"), ({"tile": 64, "overlap": 1.0}, "overlap: fo")],
)
def test_numbers_out_of_range(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Detector(white_boxes(), **numbers)
    with pytest.raises(ConfigError, match=r"--tile|--overlap"):
        DetectConfig(source=("a.jpg",), **numbers)
