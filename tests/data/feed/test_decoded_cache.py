"""Decoded-image cache shared by processes: which decodes, which waits, and what a killed one leaves."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.data.feed import decoded_cache as recent_module
from tessera.data.feed.decoded_cache import DecodedCache
from tessera.data.feed.decoded_cache import share_decoded_cache as share
from tessera.data.feed.image_store import ImageStore
from tessera.data.feed.loader import build_val_loader
from tessera.utils.errors import UserError
from tessera.utils.files import SharedFile
from tessera.utils.types import DatasetIndex, Draw
from tests.data.feed.another_process import another_process, in_another_process
from tests.data.feed.made_rank import rank
from tests.data.made_index import make_index, write_images

SIZES = [(40, 60), (90, 30), (64, 64), (30, 50), (50, 70)]


@pytest.fixture
def index(tmp_path: Path) -> DatasetIndex:
    return make_index(SIZES, paths=write_images(tmp_path / "images", SIZES))


class Counted(ImageStore):
    """A store that counts what it decodes."""

    loaded: list[int]

    def load(self, index: int) -> Any:
        self.loaded.append(index)
        return super().load(index)


@pytest.fixture
def store(index: DatasetIndex) -> Counted:
    store = Counted(index, 64, "linear")
    store.loaded = []
    return store


def draw(position: int, *mosaic_candidates: int) -> Draw:
    """A draw with these images as candidates for its mosaic, its own image last."""
    first = position - len(mosaic_candidates) + 1
    near = {image: first + number for number, image in enumerate(mosaic_candidates)}
    return Draw(mosaic_candidates[-1], position, 0, (64, 64), near)


def test_an_image_is_decoded_once_and_is_the_stores(store: Counted) -> None:
    recent = DecodedCache(store, 4)
    for place in (draw(2, 0, 1, 2), draw(3, 1, 2, 3), draw(4, 2, 3, 4)):
        with recent.near(place):
            for image in place.mosaic_candidates:
                np.testing.assert_array_equal(recent.load(image), ImageStore.load(store, image))
                assert not recent.load(image).flags.writeable
    assert store.loaded == [0, 1, 2, 3, 4]


def test_outside_of_a_draw_and_beyond_its_neighbours_nothing_is_kept(store: Counted) -> None:
    recent = DecodedCache(store, 4)
    recent.load(0)
    with recent.near(draw(1, 0, 1)):
        recent.load(3)
        recent.load(3)
    assert store.loaded == [0, 3, 3] and not recent._owners.any()


def test_an_image_that_does_not_decode_leaves_no_lock_and_no_owner(store: Counted, index: DatasetIndex) -> None:
    """A process that waits for another slot with an exclusive lock may wait forever."""
    recent = DecodedCache(store, 4)
    index.path(0).write_bytes(b"no image")
    with recent.near(draw(0, 0)):
        with pytest.raises(UserError, match="do not decode"):
            recent.load(0)
        assert not recent._owners.any() and free(recent, 0)


def free(recent: DecodedCache, slot: int) -> bool:
    """Whether another process may take `slot` for itself."""
    return bool(in_another_process(lambda _: take(recent, slot)))


def take(recent: DecodedCache, slot: int) -> bool:
    try:
        fcntl.lockf(recent._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
    except OSError:
        return False
    return True


def test_it_waits_for_one_that_decodes_the_same_image(store: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    recent = DecodedCache(store, 4)

    def decodes_slowly(pipe: Connection) -> str:
        def load(image: int) -> Any:
            pipe.send("decoding")
            assert pipe.recv() == "go on"
            return ImageStore.load(store, image)

        monkeypatch.setattr(store, "load", load)
        with recent.near(draw(0, 0)):
            recent.load(0)
        return "done"

    with another_process(decodes_slowly) as (_, pipe):
        assert pipe.poll(30) and pipe.recv() == "decoding"
        with another_process(lambda _: read(recent, 0)) as (_, waiting):
            assert not waiting.poll(0.5)  # it does not decode a second time meanwhile
            pipe.send("go on")
            assert waiting.poll(30) and waiting.recv() == ([], ImageStore.load(store, 0).tobytes())


def read(recent: DecodedCache, image: int) -> tuple[list[int], bytes]:
    """What `recent` decodes for a `Draw` of `image` in slot 0, and what it returns."""
    store: Any = recent._store
    with recent.near(draw(0, image)):
        pixels = recent.load(image).tobytes()
    return store.loaded, pixels


def test_a_slot_that_is_read_is_not_overwritten(store: Counted) -> None:
    recent = DecodedCache(store, 1)
    with recent.near(draw(0, 0)):
        held = recent.load(0)
        loaded, pixels = in_another_process(lambda _: read(recent, 3))
        assert loaded == [0, 3] and pixels == ImageStore.load(store, 3).tobytes()  # decoded for itself
        np.testing.assert_array_equal(held, ImageStore.load(store, 0))
    assert free(recent, 0)


def test_a_process_killed_while_it_decodes_leaves_a_free_slot(store: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    recent = DecodedCache(store, 1)
    with recent.near(draw(0, 1)):
        recent.load(1)

    def dies(pipe: Connection) -> None:
        def load(image: int) -> Any:
            recent._image(0, 0)[:8] = 200  # half of it is there
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(store, "load", load)
        read(recent, 0)

    with another_process(dies) as (process, _):
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    assert recent._owners.tolist() == [0] and free(recent, 0)
    store.loaded.clear()
    assert read(recent, 0) == ([0], ImageStore.load(store, 0).tobytes())


def test_many_processes_at_few_slots_get_what_the_store_gives(store: Counted) -> None:
    """Each goes through the same places at its own speed, with too few slots for all of them."""
    recent = DecodedCache(store, 3)
    right = [ImageStore.load(store, image).tobytes() for image in range(len(SIZES))]

    def reads(number: int) -> Callable[[Connection], int]:
        def work(_: Connection) -> int:
            rng, wrong = np.random.default_rng(number), 0
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                position = int(rng.integers(100))
                near = draw(position, *((position - back) % len(SIZES) for back in (3, 2, 1, 0)))
                with recent.near(near):
                    views = {image: recent.load(image) for image in near.mosaic_candidates}
                    wrong += sum(view.tobytes() != right[image] for image, view in views.items())
            return wrong

        return work

    with ExitStack() as stack:
        for _, pipe in [stack.enter_context(another_process(reads(number))) for number in range(4)]:
            assert pipe.poll(60) and pipe.recv() == 0


ROOM = 8 * 4096 * 3  # of memory, for a slot of 64 pixels in whole pages


@pytest.mark.parametrize(
    ("memory", "node_images", "slots"),
    [
        (4 * ROOM, 2, 4),  # room for two batches of the places that this node decodes
        (3 * ROOM, 1, 6),  # three batches, of which it touches a half
        (4 * ROOM + ROOM // 2, 2, 4),
        (5 * ROOM, 2, 5),  # the whole set
        (100 * ROOM, 2, 5),
    ],
)
def test_slots_take_no_more_than_a_part_of_the_memory(
    store: Counted, monkeypatch: pytest.MonkeyPatch, memory: int, node_images: int, slots: int
) -> None:
    monkeypatch.setattr(recent_module, "available_memory", lambda: memory)
    found = share(store, rank(0, 1), batch_size=2, node_images=node_images, batches=8)
    assert isinstance(found, DecodedCache) and found.slots == slots


def test_a_small_set_is_kept_whole_however_few_of_its_images_are_near(
    store: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = share(store, rank(0, 1), batch_size=1, node_images=1, batches=1)
    assert isinstance(found, DecodedCache) and found.slots == len(SIZES)
    with build_val_loader(store, rank(0, 1), batch_size=2, stride=32, workers=0, repeats=True) as loader:
        first, second = list(loader), list(loader)
    assert sorted(store.loaded) == [0, 1, 2, 3, 4]
    assert all(torch.equal(a.images, b.images) for a, b in zip(first, second, strict=True))
    monkeypatch.setattr(recent_module, "_SMALL", 4 * 4096 * 3)
    assert share(store, rank(0, 1)) is store


@pytest.mark.parametrize("memory", [None, 0, ROOM - 1])
def test_without_memory_nothing_is_kept(store: Counted, monkeypatch: pytest.MonkeyPatch, memory: int | None) -> None:
    monkeypatch.setattr(recent_module, "available_memory", lambda: memory)
    assert share(store, rank(0, 1), batch_size=4, node_images=4, batches=8) is store
    assert share(store, rank(1, 2, lambda _: (0, None)), batch_size=4, node_images=4, batches=8) is store
    monkeypatch.undo()
    monkeypatch.delattr(os, "memfd_create")  # not Linux
    assert share(store, rank(0, 1), batch_size=4, node_images=4, batches=8) is store


def test_ranks_of_a_node_share_the_first_ones_slots(store: Counted) -> None:
    said: list[Any] = []
    first = share(store, rank(0, 2, lambda v: said.append(v) or v), batch_size=4, node_images=4, batches=3)
    second = share(store, rank(1, 2, lambda _: said[0]), batch_size=4, node_images=4, batches=1)
    assert isinstance(first, DecodedCache) and isinstance(second, DecodedCache)
    with first.near(draw(1, 0, 1)):
        first.load(0)
    for other in (second, pickle.loads(pickle.dumps(first))):
        assert other.slots == first.slots and other._owners.tolist() == first._owners.tolist()


@pytest.mark.parametrize("there", ["nothing", "another file"])
def test_a_rank_that_cannot_see_the_first_ones_slots_has_its_own(
    store: Counted, tmp_path: Path, caplog: pytest.LogCaptureFixture, there: str
) -> None:
    """In another container the path may lead to any file: it is not written to."""
    path = tmp_path / "file"
    if there == "another file":
        path.write_bytes(bytes(2**20))
    shared = SharedFile(path, (1, 2))
    alone = share(store, rank(1, 2, lambda _: (3, shared)), batch_size=4, node_images=4, batches=3)
    assert isinstance(alone, DecodedCache) and alone.slots == 3
    assert "Cannot open the node's cache of decoded images" in caplog.text
    read(alone, 2)
    assert alone._owners.any() and store.loaded == [2]
    assert there == "nothing" or path.read_bytes() == bytes(2**20)
