"""Seeds, files, AutoBatch, agreement, preflight and signs of life."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from utils.checkpoints.saver import due
from utils.errors import UserError
from utils.files import SharedFile, atomic_write
from utils.ranks.agreement import require_agreement
from utils.ranks.heartbeat import Heartbeat
from utils.ranks.preflight import Host, advise
from utils.ranks.world import World
from utils.search.autobatch import auto_batch_size, fit_batch
from utils.seeding import init_seeds, sample_rng


def test_a_sample_is_a_function_of_seed_epoch_position_and_stream() -> None:
    same = [sample_rng(1, 2, 3).random(4) for _ in range(2)]
    np.testing.assert_array_equal(*same)
    others = [sample_rng(2, 2, 3), sample_rng(1, 3, 3), sample_rng(1, 2, 4), sample_rng(1, 2, 3, "order")]
    assert len({tuple(rng.random(4)) for rng in others} | {tuple(same[0])}) == 5


def test_process_seeds_differ_by_rank() -> None:
    drawn = []
    for rank in range(2):
        init_seeds(0 + 1 + rank)
        drawn.append((torch.rand(1).item(), np.random.rand()))  # noqa: NPY002
    assert drawn[0] != drawn[1]


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with atomic_write(path) as file:
        file.write(b"old")
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write(b"half of the n")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_autobatch_fits_a_line_and_takes_what_is_free() -> None:
    assert fit_batch([1, 2, 4, 8], [110, 120, 140, 180], 505) == 40
    assert fit_batch([], [], 500) == 0
    assert fit_batch([1], [600], 500) == 0
    assert fit_batch([1, 2], [100, 100], 500) == 2
    assert auto_batch_size(lambda n: (0, 0), 100, World()) == 16


class _Ranks(World):
    """Several ranks in one process: this one says `mine`, the others what is given."""

    def __init__(self, others: list[dict[str, str]]) -> None:
        super().__init__()
        self._others = others

    def all_gather(self, value):  # type: ignore[no-untyped-def]
        return [value, *getattr(self, "_others", [])]


def test_agreement_names_what_differs_and_where() -> None:
    mine = {"code": "a", "train data": "24 images"}
    require_agreement(mine, _Ranks([mine, mine]))
    with pytest.raises(UserError, match=r"train data: 24 images on rank 0, 2; 23 images on rank 1"):
        require_agreement(mine, _Ranks([{**mine, "train data": "23 images"}, mine]))


def test_advice_where_something_looks_wrong() -> None:
    good = Host("a", "cpu", 2**33, 2**40)
    assert advise([good, good], 5000, 2) == []
    lines = advise([good, Host("b", "cpu", 2**20, 2**20)], 10, 2)
    assert len(lines) == 3 and "GLOO_SOCKET_IFNAME" in lines[0] and lines[1].startswith("b: /dev/shm")


@pytest.mark.parametrize(("count", "period", "is_due"), [(3, 3, True), (4, 3, False), (4, 0, False), (4, -1, False)])
def test_due(count: int, period: int, is_due: bool) -> None:
    assert due(count, period) is is_due


def test_a_rank_that_ended_regularly_is_not_missed() -> None:
    store, said = HashStore(), []
    ended = Heartbeat(store, 1, 2, "node7", 60)
    ended.close()
    heartbeat = Heartbeat(store, 0, 2, "node6", 1.0, lambda message, code: said.append(message))
    time.sleep(3.5)
    heartbeat.close()
    assert said == []


def test_a_file_without_a_name_is_opened_by_others_and_no_other_file_in_its_place(tmp_path: Path) -> None:
    with tempfile.TemporaryFile(dir=tmp_path) as file, tempfile.TemporaryFile(dir=tmp_path) as other:
        file.write(b"what is shared")
        file.flush()
        shared = SharedFile.of(file)
        with shared.open("rb") as opened:
            assert opened.read() == b"what is shared"
            assert SharedFile.of(opened).identity == shared.identity
        with pytest.raises(FileNotFoundError, match="another file"):
            dataclasses.replace(SharedFile.of(other), identity=shared.identity).open("r+b")
    with pytest.raises(OSError):
        shared.open("rb")


def test_a_named_file_is_whatever_has_its_name(tmp_path: Path) -> None:
    path = tmp_path / "named"
    path.write_bytes(b"old")
    with path.open("rb") as file:
        shared = SharedFile.of(file)
    path.unlink()
    path.write_bytes(b"new")
    with shared.open("rb") as opened:
        assert opened.read() == b"new"
