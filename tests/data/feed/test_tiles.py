"""Tiled tiles: pixels, the tiles of an epoch, and how often files are decoded."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera.data.feed import decoded_cache as recent_module
from tessera.data.feed import image_store as images_module
from tessera.data.feed.cache import open_images
from tessera.data.feed.decoded_cache import DecodedCache
from tessera.data.feed.image_sizes import resized
from tessera.data.feed.image_store import ImageStore, image_store
from tessera.data.feed.loader import TrainLoader, build_train_loader
from tessera.data.feed.sampler import RUN, EpochOrder
from tessera.data.feed.tiles import TileIndex, build_tile_index
from tessera.data.source.decode import read_image
from tessera.utils.config import CacheMode, Hyp
from tessera.utils.ranks.world import World
from tessera.utils.types import DatasetIndex, Draw
from tests.data.feed.made_rank import rank
from tests.data.feed.test_tile_labels import labelled
from tests.data.feed.test_undecodable_images import break_data
from tests.data.made_index import picture, write_images
from tests.data.made_run import made_run
from tests.data.make import write_image

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
            np.testing.assert_array_equal(image, picture(number, SIZES[number])[top:bottom, left:right])
    again = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(again.load(3), store.load(3))


def test_a_jpeg_is_decoded_in_full_where_a_window_of_it_is_shown(tmp_path: Path) -> None:
    path = write_image(tmp_path / "a.jpg", (400, 400))
    tiles = build_tile_index(labelled([(400, 400)], [[[2, 2, 30, 30]]], paths=[path]), 200, 0.0, 25)
    np.testing.assert_array_equal(
        image_store(tiles, 25, "linear").load(3), resized(read_image(path)[200:, 200:], (25, 25), area=False)
    )


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
