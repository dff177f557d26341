"""Shared-memory budget: workers and caches never reserve the same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera.data.feed.cache import ShmBudget, open_images
from tessera.data.feed.loader import build_train_loader, build_val_loader
from tessera.data.feed.workers import reserve_workers
from tessera.utils.config import load_hyp
from tessera.utils.errors import UserError
from tessera.utils.ranks import world as world_module
from tessera.utils.ranks.world import World
from tessera.utils.types import DatasetIndex
from tests.data.feed.made_rank import rank
from tests.data.made_index import make_index, write_images
from tests.data.made_run import made_run

SIZES = [(64, 64)] * 8
BATCH_BYTES = 4 * 64 * 64 * 3
CACHE_BYTES = 8 * (64 * 64 * 3 + 1)

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")


@pytest.fixture
def index(tmp_path: Path) -> DatasetIndex:
    return make_index(SIZES, paths=write_images(tmp_path / "images", SIZES))


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """From now on /dev/shm has `size` bytes free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size))


def test_train_workers_then_the_cache_of_the_validation(index: DatasetIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "cpus_of_process", lambda *_: 2)
    room = 6 * BATCH_BYTES + CACHE_BYTES - 1  # two workers hold two batches each and the rank two: one byte too few
    for size in (room, room + 1):
        free(monkeypatch, size)
        memory = ShmBudget(World())
        run = made_run(load_hyp("hyp.scratch-low.yaml"), imgsz=64, batch_size=4, epochs=1, workers=2)
        with open_images(index, 64, "none", "linear", World(), memory) as store:
            build_train_loader(run, store, memory).close()
        if size == room:
            with pytest.raises(UserError, match=r"--cache ram: .* GiB free beside the .* GiB of loader workers"):
                open_images(index, 64, "ram", "area", World(), memory)
        else:
            open_images(index, 64, "ram", "area", World(), memory).close()


def test_caches_then_the_workers_of_the_validation(
    index: DatasetIndex, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(world_module, "cpus_of_process", lambda *_: 2)
    padded = 4 * 96 * 96 * 3
    free(monkeypatch, 2 * CACHE_BYTES + 3 * padded)  # one worker takes four batches
    memory = ShmBudget(World())
    stores = [open_images(index, 64, "ram", kind, World(), memory) for kind in ("linear", "area")]
    with build_val_loader(stores[1], World(), batch_size=4, stride=32, workers=2, memory=memory) as loader:
        assert loader._loader is not None and loader._loader.num_workers == 0
    assert "space for the batches of 0 loader workers" in caplog.text
    for store in stores:
        store.close()


def test_promises_of_all_ranks_of_the_node_count_and_kept_ones_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1000)
    memory = ShmBudget(rank(0, 2))
    assert reserve_workers(2, 50, rank(0, 2), memory) == 2
    assert memory.reserved == 2 * 6 * 50 and memory.available == 400 and memory.available_per_rank == 200
    free(monkeypatch, 400)  # the workers have taken what they were promised
    assert memory.available == 400
    free(monkeypatch, 300)  # and others something as well
    assert memory.available == 300
    assert ShmBudget(rank(1, 2, lambda _: 1000)).available == 300
    memory.reserved += 500
    assert memory.available == 0
