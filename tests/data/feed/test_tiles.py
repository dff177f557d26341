"""Tiles: pixels, labels, those of an epoch, and how often files are decoded."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tessera.data.augment.geometry import MIN_SIDE
from tessera.data.feed import decoded_cache as recent_module
from tessera.data.feed import image_store as images_module
from tessera.data.feed.cache import open_images
from tessera.data.feed.decoded_cache import DecodedCache
from tessera.data.feed.image_sizes import tile_windows
from tessera.data.feed.image_store import ImageStore, image_store
from tessera.data.feed.loader import TrainLoader, build_train_loader
from tessera.data.feed.sampler import RUN, EpochOrder
from tessera.data.feed.tiles import MIN_VISIBLE, TileIndex, build_tile_index
from tessera.utils.config import CacheMode, Hyp
from tessera.utils.errors import UserError
from tessera.utils.ranks.world import World
from tessera.utils.types import DatasetIndex, Draw
from tests.data.feed.made_rank import rank
from tests.data.feed.test_undecodable_images import break_data
from tests.data.made_index import made_image, make_index, write_images
from tests.data.made_run import made_run

TILE, OVERLAP, IMGSZ = 64, 0.25, 64
SIZES = [(150, 200), (40, 60), (130, 64), (200, 90), (64, 64), (170, 170)]
HYP = Hyp(**{**dict.fromkeys(Hyp.__dataclass_fields__, 0.0), "mosaic": 1.0, "mixup": 0.3, "fliplr": 0.5})


@pytest.fixture
def photos(tmp_path: Path) -> DatasetIndex:
    """Images, most of them larger than a tile, with one object of 12 pixels each; the last has none."""
    boxes = [[[width / 2, 20, width / 2 + 12, 32]] for _, width in SIZES[:-1]] + [[]]
    return labelled(SIZES, boxes, paths=write_images(tmp_path / "images", SIZES))


def test_what_is_trained_on_has_a_hash_and_a_cache_of_its_own(photos: DatasetIndex) -> None:
    made = [build_tile_index(photos, tile, overlap, IMGSZ) for tile, overlap in ((64, 0.25), (64, 0.3), (70, 0.25))]
    for key in ({index.content_hash() for index in (photos, *made)}, {index.digest for index in (photos, *made)}):
        assert len(key) == 4
    assert build_tile_index(photos, 64, 0.25, 96).content_hash() == made[0].content_hash(), "the same labels"
    fewer = build_tile_index(photos, 64, 0.25, 32)
    assert fewer.content_hash() != made[0].content_hash() and fewer.digest == made[0].digest, "the same pixels"


@pytest.mark.parametrize("imgsz", [64, 48])
def test_pixels_are_those_of_the_window(photos: DatasetIndex, imgsz: int) -> None:
    tiles = build_tile_index(photos, TILE, OVERLAP, imgsz)
    store, whole = image_store(tiles, imgsz, "area"), ImageStore(photos, imgsz, "area")
    for tile in range(len(tiles)):
        number, (left, top, right, bottom) = int(tiles.owners[tile]), tiles.bounds[tile].tolist()
        image = store.load(tile)
        assert image.shape[:2] == store.size(tile) and max(image.shape) == imgsz
        if tiles.tiles_of_image(tile)[-1] == tile:
            np.testing.assert_array_equal(image, whole.load(number))
        elif imgsz == TILE:
            np.testing.assert_array_equal(image, made_image(number, SIZES[number])[top:bottom, left:right])
    again = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(again.load(3), store.load(3))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """How often each file was decoded in this process."""
    counts: Counter[Path] = Counter()
    read = images_module.read_image

    def counted(path: Path, *args: Any) -> NDArray[np.uint8]:
        counts[path] += 1
        return read(path, *args)

    monkeypatch.setattr(images_module, "read_image", counted)
    return counts


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_a_cache_holds_views_and_decodes_a_picture_once(
    photos: DatasetIndex, cache: CacheMode, decoded: Counter[Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tiles = build_tile_index(photos, TILE, OVERLAP, 48)
    plain = image_store(tiles, 48, "area")
    with open_images(tiles, 48, cache, "area", World()) as cached:
        assert set(decoded.values()) == {1} and len(decoded) == len(photos)
        assert f"{len(tiles)} train tiles take" in caplog.text
        assert cached.nbytes == sum(plain.load(tile).size + 1 for tile in range(len(tiles)))
        for tile in range(len(tiles)):
            np.testing.assert_array_equal(cached.load(tile), plain.load(tile))
            assert cached.of_file(tile) == plain.of_file(tile), "a damaged image counts once"


def test_what_is_in_use_is_not_overwritten_by_other_views_of_its_image(tmp_path: Path) -> None:
    """Three tiles of an image in two slots: the third would go where the first is."""
    tiles = many(tmp_path, 2)
    store = image_store(tiles, IMGSZ, "area")
    recent = DecodedCache(store, 2)
    with recent.near(Draw(1, 2, 0, (IMGSZ, IMGSZ), {17: 0, 1: 1, 2: 2})):
        first, second = recent.load(17), recent.load(1)
        np.testing.assert_array_equal(first, store.load(17))
        np.testing.assert_array_equal(second, store.load(1))
        np.testing.assert_array_equal(recent.load(2), store.load(2))


def loader(tiles: DatasetIndex, store: ImageStore, number: int = 0, size: int = 1, **flags: Any) -> TrainLoader:
    hyp = flags.pop("hyp", HYP)
    run = made_run(hyp, rank(number, size), imgsz=IMGSZ, batch_size=8, seed=5, epochs=2, **{"workers": 0, **flags})
    return build_train_loader(run, store)


def batches(made: TrainLoader) -> list[tuple[bytes, ...]]:
    with made:
        return [
            tuple(tensor.numpy().tobytes() for tensor in (batch.images, batch.targets, batch.indices))
            for epoch in range(2)
            for batch in made.batches(epoch)
        ]


@pytest.mark.parametrize("flags", [{}, {"rect": True}], ids=["mosaic", "rect"])
def test_the_stream_is_the_same_on_any_workers_ranks_and_caches(photos: DatasetIndex, flags: dict[str, Any]) -> None:
    tiles = build_tile_index(photos, TILE, OVERLAP, IMGSZ)
    plain = image_store(tiles, IMGSZ, "area")
    alone = batches(loader(tiles, plain, **flags))
    assert batches(loader(tiles, plain, workers=2, **flags)) == alone
    with open_images(tiles, IMGSZ, "ram", "area", World()) as cached:
        assert batches(loader(tiles, cached, **flags)) == alone
    shares = [batches(loader(tiles, plain, number, 2, **flags)) for number in range(2)]
    for whole, first, second in zip(alone, *shares, strict=True):
        assert whole[0] == first[0] + second[0] and whole[2] == first[2] + second[2]


def many(tmp_path: Path, count: int, background: int = 0) -> TileIndex:
    """Tiles of images of 200 x 200 pixels, 17 each; the object of each is in the corner and in the whole."""
    sizes = [(200, 200)] * (count + background)
    boxes: list[list[list[float]]] = [[[2, 2, 14, 14]]] * count + [[]] * background
    return build_tile_index(labelled(sizes, boxes, paths=write_images(tmp_path / "many", sizes)), 64, 0.2, 64)


def test_a_picture_is_decoded_once_for_the_views_that_are_near(
    tmp_path: Path, decoded: Counter[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = many(tmp_path / "few", 6)
    batches(loader(few, image_store(few, IMGSZ, "area")))
    assert set(decoded.values()) == {1}, "a small set is cached whole"
    tiles = many(tmp_path, 24)
    store = image_store(tiles, IMGSZ, "area")
    slots = 8 * (128 // 8 + 1) * IMGSZ**2 * 3  # a few batches: fewer than there are tiles
    for hyp in (HYP, replace(HYP, mosaic=0.0)):
        decoded.clear()
        monkeypatch.setattr(recent_module, "available_memory", lambda: 8 * slots)
        batches(loader(tiles, store, hyp=hyp))
        assert 2 * len(tiles.whole_images) < decoded.total() < 2 * tiles.images_per_epoch * 2 / 3


def test_an_epoch_has_every_object_every_whole_picture_and_other_empty_tiles(tmp_path: Path) -> None:
    tiles = many(tmp_path, 12, background=1)
    assert (len(tiles), tiles.with_objects, len(tiles.empty_tiles)) == (13 * 17, 24, 12 * 15 + 16)
    assert tiles.images_per_epoch == 49, "with the whole image of the background"
    order = EpochOrder(len(tiles), 7, 3, IMGSZ, tiles=tiles)
    kept = set(range(len(tiles))) - set(tiles.empty_tiles.tolist())
    epochs = [order.plan(epoch)[0].tolist() for epoch in range(40)]
    for views_of_epoch in epochs:
        assert len(views_of_epoch) == len(set(views_of_epoch)) == 49 and kept <= set(views_of_epoch)
    assert len(set().union(*epochs)) > 0.97 * len(tiles), "in the course of a run nearly all are seen"
    assert epochs == [EpochOrder(len(tiles), 7, 3, IMGSZ, tiles=tiles).plan(epoch)[0].tolist() for epoch in range(40)]
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 40
    order.reweight(np.where(np.arange(len(tiles)) == 0, 1.0, 1e-9))
    assert Counter(order.plan(0)[0].tolist())[0] > 40


def test_views_of_a_picture_come_in_short_runs(tmp_path: Path) -> None:
    tiles = many(tmp_path, 30)
    owners = tiles.owners[EpochOrder(len(tiles), 8, 0, IMGSZ, tiles=tiles).plan(0)[0]]
    runs = np.diff(np.flatnonzero(np.diff(owners, prepend=-1, append=-1)))
    assert runs.max() <= 2 * RUN and runs.mean() > RUN / 2
    assert (np.diff(owners[np.diff(owners, prepend=-1) != 0]) < 0).any(), "in random order"


def test_a_damaged_picture_counts_once(
    photos: DatasetIndex, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_data(photos.path(0))
    tiles = build_tile_index(photos, TILE, OVERLAP, IMGSZ)
    batches(loader(tiles, image_store(tiles, IMGSZ, "area")))
    assert caplog.text.count("did not decode") == 1 and "1 of 6 images did not decode so far" in caplog.text


def labelled(
    sizes_hw: Sequence[tuple[int, int]], boxes: Sequence[Sequence[Sequence[float]]], **more: Any
) -> DatasetIndex:
    """An index whose images have the boxes given, of class 0, 1, 2, 0 …"""
    index = make_index(sizes_hw, classes=[[number % 3 for number in range(len(own))] for own in boxes], **more)
    return replace(index, boxes_xyxy=np.array([box for own in boxes for box in own], np.float32).reshape(-1, 4))


@st.composite
def scenes(draw: st.DrawFn) -> tuple[DatasetIndex, int, float, int]:
    """Images with boxes, some of which reach beyond the border or have no area; tile, overlap and training size."""
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
