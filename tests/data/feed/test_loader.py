"""Batches from real workers: the same for any workers and ranks, and after a resume; ignored regions in them."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.data.feed import loader as loader_module
from tessera.data.feed import sampler as sampler_module
from tessera.data.feed.dataset import TrainDataset, ValDataset
from tessera.data.feed.decoded_cache import DecodedCache
from tessera.data.feed.image_store import ImageStore
from tessera.data.feed.loader import TrainLoader, build_train_loader, build_val_loader
from tessera.data.feed.sampler import EpochOrder, TrainSampler
from tessera.utils.config import Hyp, load_hyp
from tessera.utils.engine.context import RunContext
from tessera.utils.errors import UserError
from tessera.utils.ranks import world as world_module
from tessera.utils.types import Batch, DatasetIndex, Draw
from tests.data.feed.made_rank import rank
from tests.data.made_index import make_index, write_images
from tests.data.made_run import made_run

SIZES = [(40, 60), (90, 30), (64, 64), (30, 50), (50, 70), (33, 44), (64, 20)]
EPOCHS = 3


@pytest.fixture(autouse=True)
def many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "cpus_of_process", lambda *_: 16)


@pytest.fixture
def index(tmp_path: Path) -> DatasetIndex:
    return make_index(SIZES, paths=write_images(tmp_path / "images", SIZES), polygons=True)


@pytest.fixture(scope="module")
def hyp() -> Hyp:
    names = dict.fromkeys(Hyp.__dataclass_fields__, 0.0)
    strong = {"hsv_h": 0.1, "hsv_s": 0.5, "scale": 0.5, "translate": 0.1, "degrees": 10.0, "fliplr": 0.5}
    return Hyp(**{**names, **strong, "mosaic": 1.0, "mixup": 0.3, "copy_paste": 0.5})


def train_loader(index: DatasetIndex, hyp: Hyp, world: Any = None, **options: Any) -> TrainLoader:
    return build_train_loader(settings(hyp, world or rank(0, 1), **options), ImageStore(index, 64, "linear"))


def settings(hyp: Hyp, world: Any, **options: Any) -> RunContext:
    return made_run(hyp, world, imgsz=64, batch_size=4, **{"seed": 5, "epochs": EPOCHS, "workers": 0, **options})


def fingerprint(batch: Batch) -> tuple[bytes, ...]:
    tensors = (batch.images, batch.targets, batch.indices, batch.sizes_hw, batch.placements)
    return tuple(tensor.numpy().tobytes() for tensor in tensors)


def stream(loader: TrainLoader, start: tuple[int, int] = (0, 0)) -> list[tuple[bytes, ...]]:
    with loader:
        return [
            fingerprint(batch)
            for epoch in range(start[0], EPOCHS)
            for batch in loader.batches(epoch, start[1] if epoch == start[0] else 0)
        ]


@pytest.mark.parametrize("options", [{}, {"rect": True}, {"close_mosaic": 2}], ids=str)
def test_the_stream_is_the_same_for_any_number_of_workers(
    index: DatasetIndex, hyp: Hyp, options: dict[str, Any]
) -> None:
    alone = stream(train_loader(index, hyp, **options))
    assert len(alone) == EPOCHS * 2 and len(set(alone)) == len(alone)
    for workers in (1, 2):
        assert stream(train_loader(index, hyp, workers=workers, **options)) == alone


@pytest.mark.parametrize("rect", [False, True])
def test_the_ranks_shares_make_up_the_global_batch(index: DatasetIndex, hyp: Hyp, rect: bool) -> None:
    with train_loader(index, hyp, rect=rect) as loader:
        whole = [batch for epoch in range(EPOCHS) for batch in loader.batches(epoch)]
    assert whole[0].images.permute(0, 3, 1, 2).is_contiguous(memory_format=torch.channels_last)
    assert whole[0].placements.isnan().all(), "augmentation cannot be undone"
    for size in (2, 4):
        loaders = [train_loader(index, hyp, rank(number, size), rect=rect) for number in range(size)]
        parts = [[batch for epoch in range(EPOCHS) for batch in loader.batches(epoch)] for loader in loaders]
        for together, shares in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat([share.images for share in shares]), together.images)
            assert torch.equal(torch.cat([share.indices for share in shares]), together.indices)
            for number, share in enumerate(shares):
                share.targets[:, 0] += number * 4 // size
            assert torch.equal(torch.cat([share.targets for share in shares]), together.targets)


@pytest.mark.parametrize("start", [(0, 1), (1, 0), (1, 1), (2, 2)])
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_anywhere_the_stream_is_the_tail_of_the_whole(
    index: DatasetIndex, hyp: Hyp, start: tuple[int, int], workers: int
) -> None:
    whole = stream(train_loader(index, hyp))
    assert stream(train_loader(index, hyp, workers=workers), start) == whole[start[0] * 2 + start[1] :]


class Witness(TrainDataset):
    """Leaves a file for every epoch that a sample is made of."""

    folder: Path

    def _render(self, draw: Draw, out: np.ndarray) -> Any:
        (self.folder / str(draw.epoch)).touch()
        return super()._render(draw, out)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_next_epoch_begins_as_the_last_batch_is_handed_over(
    index: DatasetIndex, hyp: Hyp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weighted: bool
) -> None:
    monkeypatch.setattr(Witness, "folder", tmp_path, raising=False)
    monkeypatch.setattr(loader_module, "TrainDataset", Witness)
    with train_loader(index, hyp, workers=1, image_weights=weighted) as loader:
        batches = loader.batches(0)
        next(batches), next(batches)
        deadline = time.monotonic() + (0.3 if weighted else 60)
        while not (tmp_path / "1").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / "1").exists() != weighted  # with weights, the next epoch is not known yet
        assert len(list(itertools.chain.from_iterable(map(loader.batches, range(1, EPOCHS))))) == 2 * (EPOCHS - 1)
        time.sleep(0.1)
        assert not (tmp_path / str(EPOCHS)).exists()  # nothing is prepared beyond the last epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_hold_from_the_next_epoch_on(index: DatasetIndex, hyp: Hyp, workers: int) -> None:
    with train_loader(index, hyp, workers=workers, image_weights=True) as loader:
        for epoch, favourite in ((0, 3), (1, 5)):
            loader.reweight(np.eye(len(index))[favourite])
            seen = torch.cat([batch.indices for batch in loader.batches(epoch)])
            assert set(seen.tolist()) == {favourite} and len(seen) == 8


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("training", [True, False])
def test_a_mistake_in_the_data_arrives_as_its_own_message(
    index: DatasetIndex, hyp: Hyp, workers: int, training: bool
) -> None:
    path = index.path(4)
    path.unlink()
    if training:
        loader: Any = train_loader(index, hyp, workers=workers)
        batches: Iterator[Batch] = loader.batches(0)
    else:
        store = ImageStore(index, 64, "area")
        loader = build_val_loader(store, rank(0, 1), batch_size=2, stride=32, workers=workers)
        batches = iter(loader)
    with loader, pytest.raises(UserError) as caught:
        list(batches)
    assert type(caught.value) is UserError
    assert str(caught.value).startswith(f"{path}: cannot read the image") and "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 10])
def test_validation_sees_every_image_once_and_can_be_undone(index: DatasetIndex, workers: int, size: int) -> None:
    store = ImageStore(index, 64, "area")
    seen: list[int] = []
    for number in range(size):
        loader = build_val_loader(store, rank(number, size), batch_size=3, stride=32, workers=workers)
        with loader:
            for _ in range(2):  # each validation alike
                batches = list(loader)
                assert len(batches) == len(loader)
        for batch in batches:
            seen += batch.indices.tolist()
            assert torch.equal(batch.sizes_hw, torch.from_numpy(index.sizes_hw[batch.indices.numpy()].astype(np.int64)))
            for i, image in enumerate(batch.indices.tolist()):
                check_placed(index, store, image, batch, i)
    assert sorted(seen) == list(range(len(index)))


def check_placed(index: DatasetIndex, store: ImageStore, image: int, batch: Batch, row: int) -> None:
    """The image is unchanged at its placement, grey around it, and the boxes lead back to the labels."""
    scale_x, scale_y, left, top = batch.placements[row].tolist()
    loaded = store.load(image)
    height, width = loaded.shape[:2]
    assert (width, height) == pytest.approx((index.sizes_hw[image] * (scale_y, scale_x))[::-1])
    canvas = np.full(batch.images.shape[1:], 114, np.uint8)
    canvas[int(top) : int(top) + height, int(left) : int(left) + width] = loaded
    np.testing.assert_array_equal(batch.images[row].numpy(), canvas)
    own = batch.targets[batch.targets[:, 0] == row].numpy()
    classes, boxes_xyxy = index.labels(image)
    np.testing.assert_array_equal(own[:, 1], classes)
    undone = (own[:, 2:] - (left, top, left, top)) / (scale_x, scale_y, scale_x, scale_y)
    np.testing.assert_allclose(undone, boxes_xyxy, rtol=1e-5)


def test_labels_and_polygons_are_scaled_with_the_image(index: DatasetIndex, hyp: Hyp) -> None:
    sample = ValDataset(index, ImageStore(index, 120, "linear")).sample(1)  # 90 x 30 to 120 x 40
    assert sample.image.shape == (120, 40, 3)
    classes, boxes_xyxy = index.labels(1)
    np.testing.assert_allclose(sample.boxes_xyxy, boxes_xyxy * 4 / 3, rtol=1e-6)
    np.testing.assert_array_equal(sample.classes, classes)
    np.testing.assert_allclose(sample.segments[0], index.segments(1)[0] * 4 / 3, rtol=1e-6)
    assert sample.boxes_xyxy.dtype == sample.segments[0].dtype == np.float32


@pytest.mark.parametrize("batch_size", [2, 4, 8])
@pytest.mark.parametrize("workers", [1, 4])
def test_an_image_is_decoded_once_for_all_the_mosaics_it_is_in(
    tmp_path: Path, hyp: Hyp, monkeypatch: pytest.MonkeyPatch, batch_size: int, workers: int
) -> None:
    monkeypatch.setattr(sampler_module, "MOSAIC_POOL", 8)
    sizes = [(16, 16)] * 200
    index = make_index(sizes, paths=write_images(tmp_path / "many", sizes), polygons=True)
    store = ImageStore(index, 64, "linear")
    loaded: list[int] = []
    monkeypatch.setattr(store, "load", lambda image: loaded.append(image) or ImageStore.load(store, image))
    first = DecodedCache(store, 8 + workers * batch_size)
    # Workers side by side, each at its own batch: they see one another's slots as other processes do.
    shared = [first] + [DecodedCache(store, first.slots, first.share()) for _ in range(workers - 1)]
    datasets = [TrainDataset(index, recent, hyp, 5, EPOCHS) for recent in shared]
    draws = list(TrainSampler(EpochOrder(200, batch_size, 5, 64)))
    out = np.empty((64, 64, 3), np.uint8)
    for start in range(0, len(draws), workers):
        for side_by_side in itertools.zip_longest(*draws[start : start + workers]):
            for dataset, draw in zip(datasets, side_by_side, strict=False):
                dataset._render(draw, out)
    assert set(loaded) == set(range(200)) and len(loaded) <= 210  # the first windows reach back to the epoch's end


@pytest.mark.parametrize("polygons", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_ignored_regions_are_rows_of_class_minus_one_behind_the_objects(
    tmp_path: Path, train: bool, polygons: bool
) -> None:
    sizes = [(40, 80), (64, 64)]
    plain = make_index(sizes, paths=write_images(tmp_path, sizes), classes=[[1], [2, 0]], polygons=polygons)
    marked = dataclasses.replace(
        plain,
        ignored_offsets=np.array([0, 2, 2]),
        ignored_classes=np.array([-1, 1], np.int32),
        ignored_boxes_xyxy=np.array([[0, 0, 40, 20], [40, 20, 80, 40]], np.float32),
    )
    rows = []
    for index in (plain, marked):
        store = ImageStore(index, 64, "linear")
        hyp = load_hyp("hyp.no-augmentation.yaml")
        dataset = TrainDataset(index, store, hyp, 0, 0) if train else ValDataset(index, store)
        rows.append(dataset.__getitems__([Draw(0, 0, 0, (64, 64)), Draw(1, 1, 0, (64, 64))]).targets)
    without, found = rows
    ignored = found[:, 1] < 0
    assert torch.equal(found[~ignored], without)
    torch.testing.assert_close(found[ignored], torch.tensor([[0, -1, 0, 16, 32, 32], [0, -1, 32, 32, 64, 48.0]]))
