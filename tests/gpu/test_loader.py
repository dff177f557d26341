"""Batches for a CUDA device come page-locked, and are the same ones."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tessera.data.feed.image_store import ImageStore
from tessera.data.feed.loader import TrainLoader, build_train_loader
from tessera.utils.config import load_hyp
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tessera.utils.types import Batch, DatasetIndex
from tests.data.made_index import make_index, write_images
from tests.data.made_run import made_run

SIZES = [(40, 60), (90, 30), (64, 64), (30, 50), (50, 70), (33, 44), (64, 20)]
EPOCHS = 3


class Pinning(Accelerator):
    pins_memory = True


@pytest.fixture
def index(tmp_path: Path) -> DatasetIndex:
    return make_index(SIZES, paths=write_images(tmp_path / "images", SIZES), polygons=True)


def train_loader(index: DatasetIndex, accelerator: Accelerator, **flags: Any) -> TrainLoader:
    flags = {"imgsz": 64, "batch_size": 4, "seed": 5, "epochs": EPOCHS, **flags}
    run = made_run(load_hyp("hyp.scratch-low.yaml"), World(accelerator=accelerator), **flags)
    return build_train_loader(run, ImageStore(index, 64, "linear"))


def fingerprint(batch: Batch) -> tuple[bytes, ...]:
    tensors = (batch.images, batch.targets, batch.indices, batch.sizes_hw, batch.placements)
    return tuple(tensor.numpy().tobytes() for tensor in tensors)


def stream(loader: TrainLoader) -> list[tuple[bytes, ...]]:
    with loader:
        return [fingerprint(batch) for epoch in range(EPOCHS) for batch in loader.batches(epoch)]


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_pinned_for_a_gpu(index: DatasetIndex, workers: int) -> None:
    plain = stream(train_loader(index, Accelerator(), workers=0))
    loader = train_loader(index, Pinning(), workers=workers)
    batch = next(loader.batches(0))
    assert batch.images.is_pinned()
    assert fingerprint(batch) == plain[0]
    assert stream(loader) == plain  # and closes
    assert not multiprocessing.active_children()
