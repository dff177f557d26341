"""Batches for a CUDA device come page-locked, and are the same ones."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tessera.utils.config import load_hyp
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tests.data.feed.test_loader import SIZES, fingerprint, stream, train_loader
from tests.data.made_index import make_index, write_images


class Pinning(Accelerator):
    pins_memory = True


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_pinned_for_a_gpu(tmp_path: Path, workers: int) -> None:
    index = make_index(SIZES, paths=write_images(tmp_path / "images", SIZES), polygons=True)
    hyp = load_hyp("hyp.scratch-low.yaml")
    plain = stream(train_loader(index, hyp, World()))
    loader = train_loader(index, hyp, World(accelerator=Pinning()), workers=workers)
    batch = next(loader.batches(0))
    assert batch.images.is_pinned()
    assert fingerprint(batch) == plain[0]
    assert stream(loader) == plain  # and closes
    assert not multiprocessing.active_children()
