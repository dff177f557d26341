"""Labels of tiles: objects, polygons and ignored regions in tiles, and empty tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.augment.geometry import MIN_SIDE
from tessera.data.feed.image_sizes import tile_windows
from tessera.data.feed.tiles import MIN_VISIBLE, build_tile_index
from tessera.utils.errors import UserError
from tessera.utils.types import DatasetIndex
from tests.data.made_index import make_index

TILE, OVERLAP, IMGSZ = 64, 0.25, 64


def labelled(
    sizes_hw: Sequence[tuple[int, int]], boxes: Sequence[Sequence[Sequence[float]]], **more: Any
) -> DatasetIndex:
    """An index whose images have the boxes given, of class 0, 1, 2, 0 …"""
    index = make_index(sizes_hw, classes=[[number % 3 for number in range(len(own))] for own in boxes], **more)
    return replace(index, boxes_xyxy=np.array([box for own in boxes for box in own], np.float32).reshape(-1, 4))


@st.composite
def scenes(draw: st.DrawFn) -> tuple[DatasetIndex, int, float, int]:
    """Pictures with boxes, some of which reach beyond the border or have no area; tile, overlap and training size."""
    sizes = draw(st.lists(st.tuples(st.integers(10, 400), st.integers(10, 400)), min_size=1, max_size=3))
    boxes = []
    for height, width in sizes:
        corners = st.tuples(st.integers(-9, width), st.integers(-9, height), st.integers(0, 90), st.integers(0, 90))
        own = draw(st.lists(corners, min_size=1, max_size=6))
        boxes.append([[x, y, x + w, y + h] for x, y, w, h in own])
    tile, overlap = draw(st.integers(90, 200)), draw(st.floats(0, 0.6))
    return labelled(sizes, boxes), tile, overlap, draw(st.sampled_from([32, 96, 320]))


def expected_labels(
    index: DatasetIndex, number: int, tile: int, overlap: float, imgsz: int
) -> list[tuple[list[tuple[float, ...]], list[tuple[float, ...]]]]:
    """Of each tile of an image, its objects and ignored parts of objects: rows class, x1, y1, x2, y2, one by one."""
    height, width = index.sizes_hw[number].tolist()
    classes, boxes = index.labels(number)
    rows = list(zip(classes.tolist(), boxes.tolist(), strict=True))
    bounds = tile_windows((height, width), tile, overlap)
    if len(bounds) == 1:
        return [([(c, *box) for c, box in rows], [])]
    found = []
    for left, top, right, bottom in bounds:
        scale, kept, ignored = imgsz / max(right - left, bottom - top), [], []
        for c, (x1, y1, x2, y2) in rows:
            inside = min(max(x1, 0), width), min(max(y1, 0), height), min(x2, width), min(y2, height)
            area = (inside[2] - inside[0]) * (inside[3] - inside[1])
            x1, y1, x2, y2 = max(inside[0], left), max(inside[1], top), min(inside[2], right), min(inside[3], bottom)
            enough = (x2 - x1) * (y2 - y1) >= MIN_VISIBLE * area and min(x2 - x1, y2 - y1) * scale > MIN_SIDE
            if x2 > x1 and y2 > y1:
                row = c if enough else -1, x1 - left, y1 - top, x2 - left, y2 - top
                (kept if enough else ignored).append(row)
        found.append((kept, ignored))
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(scenes())
def test_labels_are_cut_to_the_window_and_kept_by_what_it_shows(case: tuple[DatasetIndex, int, float, int]) -> None:
    index, tile, overlap, imgsz = case
    expected = [rows for number in range(len(index)) for rows in expected_labels(index, number, tile, overlap, imgsz)]
    if not any(kept for kept, _ in expected):
        with pytest.raises(UserError, match=f"no tile of train has an object: at --imgsz {imgsz}"):
            build_tile_index(index, tile, overlap, imgsz)
        return
    tiles = build_tile_index(index, tile, overlap, imgsz)
    assert len(tiles) == len(expected)
    whole = set((tiles.tile_offsets[1:] - 1).tolist())
    assert tiles.empty_tiles.tolist() == [v for v, rows in enumerate(expected) if rows == ([], []) and v not in whole]
    for own, rows in enumerate(expected):
        found = tuple(
            list(zip(classes.tolist(), *boxes.T.tolist(), strict=True))
            for classes, boxes in (tiles.labels(own), tiles.ignored(own))
        )
        assert found == rows
        left, top, right, bottom = tiles.bounds[own].tolist()
        assert tiles.sizes_hw[own].tolist() == [bottom - top, right - left]
        assert tiles.path(own) == index.path(int(tiles.owners[own]))
        assert own in tiles.tiles_of_image(own)


def test_an_object_smaller_than_the_overlap_is_whole_in_a_tile() -> None:
    boxes = [[x, y, x + 12, y + 12] for x in range(0, 388, 4) for y in range(0, 288, 24)]
    tiles = build_tile_index(labelled([(300, 400)], [boxes]), TILE, OVERLAP, IMGSZ)
    whole = set()
    for tile in range(len(tiles) - 1):
        _, found = tiles.labels(tile)
        left, top, _, _ = tiles.bounds[tile].tolist()
        whole |= {(x + left, y + top) for x, y, x2, y2 in found.tolist() if (x2 - x, y2 - y) == (12, 12)}
    assert whole == {(float(x), float(y)) for x, y, _, _ in boxes} and tiles.unseen == 0


def test_of_a_polygon_its_own_area_counts_and_its_box_shrinks_to_what_is_seen() -> None:
    """Triangles with the right angle at the top left; the seam of the left tile is at 64, of the right one at 36."""
    index = labelled([(64, 100)], [[[30, 10, 90, 50], [62, 10, 92, 40]]], polygons=True)
    corners = [[(30, 10), (90, 10), (30, 50)], [(62, 10), (92, 10), (62, 40)]]
    index = replace(index, segment_points=np.array(corners, np.float32).reshape(-1, 2))
    tiles = build_tile_index(index, 64, 0.2, 64)
    assert tiles.bounds.tolist() == [[0, 0, 64, 64], [36, 0, 100, 64], [0, 0, 100, 64]]
    boxes = [tiles.labels(tile)[1].tolist() for tile in range(3)]
    assert boxes[0] == [[30, 10, 64, 50]], "81 % of the first; of the second 13 %, though its box is 7 % of it"
    np.testing.assert_allclose(boxes[1], [[0, 10, 54, 46], [26, 10, 56, 40]], rtol=1e-6)
    np.testing.assert_allclose(boxes[2], [[30, 10, 90, 50], [62, 10, 92, 40]], rtol=1e-6)
    np.testing.assert_allclose(tiles.ignored(0)[1], [[62, 10, 64, 40]], rtol=1e-6)
    for tile, polygons in enumerate(map(tiles.segments, range(3))):
        for polygon, box in zip(polygons, boxes[tile], strict=True):
            np.testing.assert_allclose([*polygon.min(0), *polygon.max(0)], box, rtol=1e-6)


def test_of_few_polygons_the_other_objects_keep_their_boxes() -> None:
    index = labelled([(64, 100), (20, 20)], [[[30, 10, 90, 50], [2, 2, 20, 20]], [[1, 1, 9, 9]]])
    points = np.array([(30, 10), (90, 10), (30, 50), (1, 1), (9, 1), (1, 9)], np.float32)
    index = replace(index, segment_offsets=np.array([0, 3, 3, 6]), segment_points=points)
    tiles = build_tile_index(index, 64, 0.2, 64)
    assert [list(map(len, tiles.segments(tile))) for tile in range(4)] == [[4, 0], [3], [3, 0], [3]]
    assert tiles.labels(0)[1].tolist() == [[30, 10, 64, 50], [2, 2, 20, 20]]


def test_ignored_regions_are_cut_too() -> None:
    index = replace(
        labelled([(64, 100), (20, 20)], [[[30, 10, 60, 50]], [[1, 1, 9, 9]]]),
        ignored_offsets=np.array([0, 2, 3]),
        ignored_classes=np.array([1, 2, 0], np.int32),
        ignored_boxes_xyxy=np.array([[60, 0, 100, 64], [0, 0, 10, 10], [3, 3, 5, 5]], np.float32),
    )
    tiles = build_tile_index(index, 64, 0.2, 64)
    rows = [(classes.tolist(), boxes.tolist()) for classes, boxes in map(tiles.ignored, range(4))]
    assert rows == [
        ([1, 2], [[60, 0, 64, 64], [0, 0, 10, 10]]),
        ([1], [[24, 0, 64, 64]]),
        ([1, 2], [[60, 0, 100, 64], [0, 0, 10, 10]]),
        ([0], [[3, 3, 5, 5]]),
    ]


def test_the_inside_of_a_large_object_is_no_background() -> None:
    boxes = [[[10, 10, 390, 390]], [[x, 0, x + 20, 20] for x in range(0, 400, 40)]]
    tiles = build_tile_index(labelled([(400, 400)] * 2, boxes), 96, 0.2, 96)
    inside = [tile for tile in tiles.tiles_of_image(0)[:-1] if len(tiles.ignored(tile)[0])]
    assert len(inside) == len(tiles.tiles_of_image(0)) - 1, "each tile shows less than 30 % of it"
    in_epochs = {int(tile) for epoch in range(20) for tile in tiles.of_epoch(0, epoch)}
    assert in_epochs == set(range(len(tiles))) - set(inside)
    assert tiles.images_per_epoch == len(tiles.of_epoch(0, 0))


def test_objects_larger_than_tiles_are_refused_where_they_are_most() -> None:
    boxes: list[list[float]] = [[0, 0, 90, 20], [0, 0, 20, 70], [5, 5, 15, 15]]
    with pytest.raises(UserError, match=r"--tile 64: 2 of 3 boxes of train are larger than a tile.*long side 70 pix"):
        build_tile_index(labelled([(300, 400)], [boxes]), TILE, OVERLAP, IMGSZ)
    tiles = build_tile_index(labelled([(300, 400)], [boxes[1:]]), TILE, OVERLAP, 320)
    assert tiles.labels(len(tiles) - 1)[1].tolist() == boxes[1:], "the whole image shows it"
