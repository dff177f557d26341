"""Images with a valid header and broken data: grey in training, skipped in validation, same batches everywhere."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from tessera.data.feed.cache import open_images
from tessera.data.feed.image_store import ImageStore
from tessera.data.feed.loader import TrainLoader, build_train_loader, build_val_loader
from tessera.utils.config import CacheMode, Hyp
from tessera.utils.errors import UserError
from tessera.utils.ranks.world import World
from tessera.utils.types import FILL, Batch, DatasetIndex
from tests.data.feed.made_rank import rank
from tests.data.made_index import make_index, write_images
from tests.data.made_run import made_run

SIZES = [(40, 60), (90, 30), (64, 64), (30, 50), (50, 70), (33, 44), (64, 20), (48, 48)]
BROKEN = 2
HYP = Hyp(**{**dict.fromkeys(Hyp.__dataclass_fields__, 0.0), "mosaic": 1.0, "mixup": 0.5, "fliplr": 0.5})
PLAIN = Hyp(**dict.fromkeys(Hyp.__dataclass_fields__, 0.0))


def break_data(path: Path) -> None:
    """Leave the header and the end of a PNG, but nothing of its pixels."""
    raw = bytearray(path.read_bytes())
    start = raw.index(b"IDAT") + 4
    raw[start:-16] = bytes(len(raw) - 16 - start)
    path.write_bytes(raw)


@pytest.fixture
def index(tmp_path: Path) -> DatasetIndex:
    paths = write_images(tmp_path / "images", SIZES)
    break_data(paths[BROKEN])
    return make_index(SIZES, paths=paths, classes=[[i % 3] for i in range(len(SIZES))])


def repeated(root: Path, images: int, broken: Callable[[int], bool]) -> DatasetIndex:
    """Links to one image, or to a broken one."""
    whole, torn = write_images(root / "images", [(8, 8)] * 2)
    break_data(torn)
    paths = [root / f"{i:05}.png" for i in range(images)]
    for number, path in enumerate(paths):
        path.symlink_to(torn if broken(number) else whole)
    return make_index([(8, 8)] * images, paths=paths, classes=[[0]] * images)


def train_loader(
    index: DatasetIndex, hyp: Hyp = HYP, number: int = 0, size: int = 1, workers: int = 0, batch_size: int = 4
) -> TrainLoader:
    run = made_run(hyp, rank(number, size), imgsz=64, batch_size=batch_size, seed=5, epochs=2, workers=workers)
    return build_train_loader(run, ImageStore(index, 64, "linear"))


def batches(loader: TrainLoader) -> list[Batch]:
    with loader:
        return [batch for epoch in range(2) for batch in loader.batches(epoch)]


def test_the_stream_is_the_same_on_any_ranks_and_workers(index: DatasetIndex, caplog: pytest.LogCaptureFixture) -> None:
    whole = batches(train_loader(index))
    assert "train: 1 of 8 images did not decode so far. " in caplog.text and "2.png: found" in caplog.text
    assert caplog.text.count("It is skipped") == 1, "once an image, however often it is a mosaic's partner"
    for other in (batches(train_loader(index, workers=2)), batches(train_loader(index))):
        for one, two in zip(whole, other, strict=True):
            assert torch.equal(one.images, two.images) and torch.equal(one.targets, two.targets)
    shares = [batches(train_loader(index, number=number, size=2)) for number in range(2)]
    for together, *parts in zip(whole, *shares, strict=True):
        assert torch.equal(torch.cat([part.images for part in parts]), together.images)


def test_in_training_it_is_grey_without_objects(index: DatasetIndex) -> None:
    found = [
        (batch.images[row], batch.targets[batch.targets[:, 0] == row])
        for batch in batches(train_loader(index, PLAIN))
        for row, image in enumerate(batch.indices.tolist())
        if image == BROKEN
    ]
    assert len(found) == 2
    assert all((image == FILL).all() and len(targets) == 0 for image, targets in found)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_validation_is_without_it(index: DatasetIndex, batch_size: int, caplog: pytest.LogCaptureFixture) -> None:
    store = ImageStore(index, 64, "area")
    with build_val_loader(store, World(), batch_size=batch_size, stride=32, workers=0) as loader:
        found = list(loader)
    assert sorted(i for batch in found for i in batch.indices.tolist()) == [i for i in range(len(SIZES)) if i != BROKEN]
    for batch in found:
        assert len(batch.images) == len(batch.sizes_hw) == len(batch.placements) == len(batch) > 0
        assert set(batch.targets[:, 0].tolist()) == set(range(len(batch)))
    assert "2.png" in caplog.text


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_a_cache_knows_it_too(index: DatasetIndex, cache: CacheMode) -> None:
    plain = batches(train_loader(index))
    with open_images(index, 64, cache, "linear", World()) as store:
        run = made_run(HYP, rank(0, 1), imgsz=64, batch_size=4, seed=5, epochs=2, workers=0)
        for one, two in zip(plain, batches(build_train_loader(run, store)), strict=True):
            assert torch.equal(one.images, two.images) and torch.equal(one.targets, two.targets)


def test_many_are_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = [(20, 20)] * 40
    paths = write_images(tmp_path / "images", sizes)
    for path in paths[:20]:
        break_data(path)
    with pytest.raises(UserError, match=r"train: 17 of 40 images did not decode so far.*Run --check-data"):
        batches(train_loader(make_index(sizes, paths=paths)))
    assert caplog.text.count("It is skipped") == 7, "the first five, and each power of two"


@pytest.mark.parametrize("hyp", [HYP, PLAIN], ids=["mosaic", "plain"])
def test_many_are_an_error_on_each_of_many_ranks(tmp_path: Path, hyp: Hyp) -> None:
    """Each meets a small part of the dataset: a tenth of the whole would be more than an epoch's."""
    index = repeated(tmp_path, 2400, broken=lambda _: True)
    loader = train_loader(index, hyp, number=5, size=16, batch_size=64)
    with loader, pytest.raises(UserError, match=r"train: 32 of 2,400 images did not decode so far.*--check-data"):
        list(loader.batches(0))


@pytest.mark.parametrize("broken", [lambda i: i % 20 == 0, lambda i: i < 20], ids=["spread", "in a row"])
def test_a_few_are_not_on_many_ranks(tmp_path: Path, broken: Callable[[int], bool]) -> None:
    index = repeated(tmp_path, 800, broken)
    with train_loader(index, number=1, size=4, batch_size=16) as loader:
        assert sum(len(batch) for epoch in range(3) for batch in loader.batches(epoch)) == 3 * 200
    with build_val_loader(ImageStore(index, 64, "area"), rank(0, 2), batch_size=8, stride=32, workers=0) as val:
        assert sum(map(len, val)) == 400 - sum(map(broken, range(0, 800, 2)))


def test_what_libraries_find_wrong_is_named_once_instead_of_their_own_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name no file, and would come in every epoch. The worker's log is the rank's, as in a training."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    paths = [tmp_path / name for name in ("a.jpg", "b.jpg", "c.png")]
    for path in paths:
        cv2.imwrite(str(path), pixels)
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[: len(whole) // 2])
    png, gamma = paths[2].read_bytes(), b"gAMA\0\0"  # 4 bytes are expected
    short = len(gamma[4:]).to_bytes(4, "big") + gamma + zlib.crc32(gamma).to_bytes(4, "big")
    paths[2].write_bytes(png[:33] + short + png[33:])
    index = make_index([(64, 64)] * 3, paths=paths, classes=[[0]] * 3)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])
    with train_loader(index, PLAIN, workers=1, batch_size=3) as loader:
        for epoch in range(2):
            assert [len(batch) for batch in loader.batches(epoch)] == [3]
    damaged, odd = sorted(capfd.readouterr().err.splitlines())
    assert damaged == (
        f"{paths[1]}: damaged (Corrupt JPEG data: premature end of data segment); the decodable part is used."
    )
    assert odd.startswith(f"{paths[2]}: libpng warning: gAMA: "), odd
