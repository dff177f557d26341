"""Image stores and caches: equal pixels, one cache per node, and clean-up."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tessera.data.feed import image_store
from tessera.data.feed.cache import open_images
from tessera.data.feed.image_sizes import resized_sizes
from tessera.data.feed.image_store import ImageStore
from tessera.data.source.decode import read_image
from tessera.utils.config import CacheMode
from tessera.utils.environment import cache_dir
from tessera.utils.errors import UserError
from tessera.utils.image_size import ImageSize, SizeHw, image_size, size_hw_of
from tessera.utils.ranks.launch import open_world
from tessera.utils.ranks.world import World
from tessera.utils.types import DatasetIndex
from tests.data.made_index import made_image, make_index, write_images
from tests.system.launch import free_port

SIZES = [(40, 60), (90, 30), (64, 64), (5, 200)]

needs_shared_memory = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")


@pytest.fixture
def index(tmp_path: Path) -> DatasetIndex:
    return make_index(SIZES, paths=write_images(tmp_path / "images", SIZES))


SIDES = st.integers(32, 2048)


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.one_of(SIDES, st.tuples(SIDES, SIDES)))
@example(735, 3136, 32)  # in floating point just below a half
@example(64, 96, (96, 64))
def test_loaded_size(height: int, width: int, size: int | tuple[int, int]) -> None:
    imgsz = image_size(size)
    loaded = tuple(resized_sizes(np.array((height, width)), imgsz).tolist())
    assert min(loaded) >= 1 and any(side == most >= 0 for side, most in zip(loaded, size_hw_of(imgsz), strict=True))
    assert tuple(resized_sizes(np.array([(height, width)], np.int32), imgsz)[0].tolist()) == loaded
    ratio = min(Fraction(most, side) for most, side in zip(size_hw_of(imgsz), (height, width), strict=True))
    assert loaded == tuple(max(round(side * ratio), 1) for side in (height, width)), "half to even, exactly"


@pytest.mark.parametrize("imgsz", [32, 64, 128, SizeHw(64, 40)])
@pytest.mark.parametrize("interpolation", ["linear", "area"])
def test_resized_as_the_rule_says(index: DatasetIndex, imgsz: ImageSize, interpolation: Any) -> None:
    store = ImageStore(index, imgsz, interpolation)
    for i, size_hw in enumerate(SIZES):
        height, width = resized_sizes(np.array(size_hw), imgsz).tolist()
        area = interpolation == "area" and (height, width) < size_hw
        method = cv2.INTER_AREA if area else cv2.INTER_LINEAR
        np.testing.assert_array_equal(
            store.load(i), cv2.resize(made_image(i, size_hw), (width, height), None, 0, 0, method)
        )


@pytest.mark.parametrize(
    ("name", "pixels", "expected"),
    [
        ("grey.png", np.full((12, 15), 77, np.uint8), (77, 77, 77)),
        ("deep.png", np.full((12, 15, 3), (256 * 10, 256 * 20, 256 * 30), np.uint16), (30, 20, 10)),
        ("deep.tif", np.full((12, 15), 256 * 99, np.uint16), (99, 99, 99)),
        ("alpha.png", np.full((12, 15, 4), (1, 2, 3, 0), np.uint8), (3, 2, 1)),
        ("exact.bmp", np.full((12, 15, 3), (1, 2, 3), np.uint8), (3, 2, 1)),
        ("float.pfm", np.full((12, 15, 3), (0.2, 0.4, 2.0), np.float32), (255, 102, 51)),
        ("bild größe 图.png", np.full((12, 15, 3), (1, 2, 3), np.uint8), (3, 2, 1)),
    ],
)
def test_all_kinds_come_as_rgb_bytes(tmp_path: Path, name: str, pixels: np.ndarray, expected: tuple[int, ...]) -> None:
    path = tmp_path / name
    ok, encoded = cv2.imencode(path.suffix, pixels)
    assert ok
    path.write_bytes(encoded.tobytes())
    image = read_image(path)
    assert image.dtype == np.uint8 and image.shape == (12, 15, 3)
    assert (image == expected).all()


@pytest.mark.parametrize(
    ("size_hw", "by", "imgsz"),
    [
        ((95, 60), 1, 32),
        ((96, 61), 2, 32),
        ((191, 97), 2, 32),
        ((97, 193), 4, 32),
        ((400, 301), 8, 32),
        ((191, 95), 1, SizeHw(64, 32)),
        ((97, 193), 2, SizeHw(32, 64)),
    ],
)
def test_a_jpeg_far_too_large_is_decoded_smaller(
    tmp_path: Path, size_hw: tuple[int, int], by: int, imgsz: ImageSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.jpg"
    cv2.imwrite(str(path), cv2.GaussianBlur(made_image(0, size_hw), (0, 0), 8), [cv2.IMWRITE_JPEG_QUALITY, 98])
    reduced = read_image(path, by)
    assert reduced.shape[:2] == tuple(-(-side // by) for side in size_hw)
    index = make_index([size_hw], paths=[path])
    asked = []
    monkeypatch.setattr(image_store, "read_image", lambda p, by, rule: asked.append(by) or read_image(p, by, rule))
    found = ImageStore(index, imgsz, "linear").load(0)
    assert asked == [by] and found.shape[:2] == tuple(resized_sizes(np.array(size_hw), imgsz))
    exact = cv2.resize(read_image(path), found.shape[1::-1], interpolation=cv2.INTER_AREA)
    assert np.abs(found.astype(int) - exact).mean() < 4
    ImageStore(index, imgsz, "area").load(0)
    assert asked[1:] == [1]


def test_an_image_that_changed_since_the_scan(tmp_path: Path) -> None:
    index = make_index([(40, 60)], paths=write_images(tmp_path, [(60, 40)]))
    with pytest.raises(UserError, match=r"0\.png: found 60x40 pixels, expected 40x60"):
        ImageStore(index, 64, "linear").load(0)


def named_memory() -> list[str]:
    """Files in /dev/shm that this process holds open and that have a name."""
    held = [file.readlink() for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return [str(path) for path in held if path.parts[:3] == ("/", "dev", "shm") and path.exists()]


@pytest.mark.parametrize("cache", ["ram", "disk"])
@needs_shared_memory
def test_a_cache_holds_the_same_pixels(index: DatasetIndex, cache: CacheMode, caplog: pytest.LogCaptureFixture) -> None:
    """And says how large it is, and where."""
    caplog.set_level("INFO")
    before = named_memory()
    plain = ImageStore(index, 48, "area")
    with open_images(index, 48, cache, "area", World()) as cached:
        where = "memory (/dev/shm)" if cache == "ram" else str(cache_dir() / "images")
        assert f"--cache {cache}: 4 train images take 0.00 GiB in {where}" in caplog.text
        assert cached.nbytes == sum(plain.load(i).size + 1 for i in range(len(plain)))
        for i in range(len(index)):
            index.path(i).unlink()  # what follows comes from the cache
        for store in (cached, pickle.loads(pickle.dumps(cached))):
            for i, size_hw in enumerate(SIZES):
                assert store.load(i).shape == (*resized_sizes(np.array(size_hw), 48), 3)
                with pytest.raises(ValueError, match="read-only"):
                    store.load(i)[:] = 0
            assert [store.load(i).tobytes() for i in range(4)] == [cached.load(i).tobytes() for i in range(4)]
        assert named_memory() == before  # no name, so nothing that could stay behind
    write_images(index.path(0).parent, SIZES)
    with open_images(index, 48, cache, "area", World()) as cached:
        for i in range(len(index)):
            np.testing.assert_array_equal(cached.load(i), plain.load(i))


def test_a_disk_cache_that_is_cut_while_it_is_in_use_is_left(
    index: DatasetIndex, caplog: pytest.LogCaptureFixture
) -> None:
    plain = ImageStore(index, 48, "area")
    with open_images(index, 48, "disk", "area", World()) as cached:
        (file,) = (cache_dir() / "images").iterdir()
        os.truncate(file, 0)
        for store in (cached, pickle.loads(pickle.dumps(cached))):
            for i in range(len(index)):
                np.testing.assert_array_equal(store.load(i), plain.load(i))
        file.unlink()
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(cached)).load(0), plain.load(0))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.partition(": ")[2] for text in warnings] == [
        "cut while it was in use: images are decoded from their files instead."
    ]


def test_a_disk_cache_is_built_once_for_each_setting(index: DatasetIndex, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "images"
    open_images(index, 48, "disk", "area", World()).close()
    (first,) = folder.iterdir()
    for i in range(len(index)):
        index.path(i).unlink()
    open_images(index, 48, "disk", "area", World()).close()  # nothing to decode from: it was found
    write_images(index.path(0).parent, SIZES)
    open_images(index, 48, "disk", "linear", World()).close()
    open_images(index, 64, "disk", "area", World()).close()
    assert len(list(folder.iterdir())) == 3
    first.write_bytes(b"cut short")
    with open_images(index, 48, "disk", "area", World()) as again:
        np.testing.assert_array_equal(again.load(0), ImageStore(index, 48, "area").load(0))


@pytest.mark.parametrize("cache", ["ram", "disk"])
@needs_shared_memory
def test_too_little_room_is_reported_before_anything_is_decoded(
    index: DatasetIndex, cache: CacheMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr(ImageStore, "write_cache", lambda *_: pytest.fail("decoded without room"))
    with pytest.raises(UserError, match=rf"--cache {cache}: the 4 train images take .* GiB .* free"):
        open_images(index, 64, cache, "linear", World())


@pytest.mark.parametrize("cache", ["ram", "disk"])
@pytest.mark.parametrize("missing", [True, False])
@needs_shared_memory
def test_a_build_that_fails_leaves_nothing(
    index: DatasetIndex, cache: CacheMode, missing: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if missing:
        index.path(1).unlink()
    else:
        monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match=r"1\.png" if missing else f"--cache {cache}: .* filled up"):
        open_images(index, 64, cache, "linear", World())
    assert not list((tmp_path / "cache").rglob("*.*"))


@needs_shared_memory
def test_ranks_of_a_node_share_one_cache(index: DatasetIndex) -> None:
    port, context = free_port(), multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, port, index, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    first, second = (results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0] and first == second


def _rank(rank: int, port: int, index: DatasetIndex, results: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with open_world("cpu") as world, open_images(index, 48, "ram", "area", world) as store:
        assert store._cache is not None
        inode = os.fstat(store._cache.fileno()).st_ino
        results.put((inode, [int(store.load(i).sum()) for i in range(len(store))]))
        world.barrier()  # the first rank keeps the file until all have read from it
