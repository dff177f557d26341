"""Ranks with other commands, flags, code, models or data are refused, with what differs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.utils.bit_depth import PixelRule
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.errors import UserError
from tessera.utils.flags.options import Options
from tessera.utils.flags.val import ValConfig
from tessera.utils.ranks import consistency
from tessera.utils.ranks.consistency import data_fingerprint, describe_call, require_agreement, require_same_command
from tessera.utils.ranks.world import World
from tessera.utils.types import DatasetIndex
from tests.at_once import at_once
from tests.data.made_index import make_index


def together(*calls: Callable[[World], None]) -> None:
    """Make each call on a rank of its own; raise the error of the first that failed."""
    barrier, board = threading.Barrier(len(calls)), dict[int, Any]()

    def exchange(rank: int, value: Any) -> list[Any]:
        board[rank] = value
        barrier.wait(60)
        found = [board[other] for other in range(len(calls))]
        barrier.wait(60)
        return found

    def one(rank: int) -> None:
        world = World()
        world.rank, world.size = rank, len(calls)
        world.all_gather = partial(exchange, rank)  # type: ignore[method-assign, assignment]
        calls[rank](world)

    at_once([partial(one, rank) for rank in range(len(calls))])


def agree(*values: dict[str, str]) -> None:
    together(*(partial(require_agreement, mine) for mine in values))


def agree_on_commands(*configs: Options) -> None:
    together(*(partial(require_same_command, config) for config in configs))


def test_agreement_names_what_differs_and_where() -> None:
    mine = {"code": "a", "train data": "24 images"}
    agree(mine, mine, mine)
    with pytest.raises(UserError, match=r"train data: 24 images on rank 0, 2; 23 images on rank 1"):
        agree(mine, {**mine, "train data": "23 images"}, mine)


def test_other_hyperparameters_models_or_code_are_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexes = {"train": make_index([(24, 32)])}

    def fingerprint(channels: int = 4, **changed: float) -> dict[str, str]:
        hyp = dataclasses.replace(load_hyp("hyp.scratch-low.yaml"), **changed)
        return consistency.run_fingerprint(hyp, indexes, torch.nn.Conv2d(3, channels, 1))

    def differing(other: dict[str, str]) -> set[str]:
        assert other.keys() == mine.keys()
        return {name for name in mine if mine[name] != other[name]}

    mine = fingerprint()
    assert differing(fingerprint()) == set()
    assert differing(fingerprint(lr0=0.02)) == {"hyp lr0"}
    assert differing(fingerprint(channels=5)) == {"model"}
    monkeypatch.setattr(consistency.tessera, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands" / "train.py").write_text("pass")
    assert differing(fingerprint()) == {"code"}


PLAIN = make_index([(24, 32), (32, 24)])


def ignoring(side: int) -> DatasetIndex:
    offsets, classes, boxes = np.array([0, 0, 1]), np.zeros(1, np.int32), np.array([[0, 0, side, side]], np.float32)
    return dataclasses.replace(PLAIN, ignored_offsets=offsets, ignored_classes=classes, ignored_boxes_xyxy=boxes)


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (
            PLAIN,
            dataclasses.replace(PLAIN, pixels=PixelRule("range", 0, 4095)),
            r"2 images, \w+ on rank 0; 2 images, \w+, `pixels: range-0-4095` on rank 1\n",
        ),
        (PLAIN, ignoring(4), r"2 images, \w+ on rank 0; 2 images, \w+, 1 ignored regions on rank 1"),
        (ignoring(5), ignoring(4), r"2 images, \w+, 1 ignored regions on rank 0; 2 images, \w+, 1 ignored"),
    ],
    ids=["levels", "no regions", "other regions"],
)
def test_other_levels_and_ignored_regions_are_other_data(one: DatasetIndex, other: DatasetIndex, found: str) -> None:
    mine, theirs = (data_fingerprint({"train": index}) for index in (one, other))
    agree(theirs, theirs)
    with pytest.raises(UserError, match=f"train data: {found}"):
        agree(mine, theirs)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (TrainConfig(check_data=True), "--check-data: False on rank 0; True on rank 1"),
        (TrainConfig(evolve=3), "--evolve: 0 on rank 0; 3 on rank 1"),
        (TrainConfig(resume="newest"), "--resume: not given on rank 0; given on rank 1"),
        (TrainConfig(hyp="own.yaml"), "--hyp: not given on rank 0; given on rank 1"),
        (TrainConfig(weights="nowhere.pt"), "--weights: auto on rank 0; nowhere.pt on rank 1"),
        (TrainConfig(seed=4), "--seed: 0 on rank 0; 4 on rank 1"),
        (TrainConfig(cache="ram"), "--cache: none on rank 0; ram on rank 1"),
        (ValConfig(weights=""), r"command: train.py on rank 0; val.py on rank 1"),
    ],
)
def test_ranks_that_were_asked_for_other_work_are_refused(other: Options, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        agree_on_commands(TrainConfig(), other)


def test_settings_of_one_rank_may_differ() -> None:
    agree_on_commands(
        TrainConfig(weights="/a/best.pt"), TrainConfig(weights="b/best.pt", workers=3, project="elsewhere")
    )


def test_a_call_is_described_alike_on_every_host() -> None:
    one, other = TrainConfig(data="/a/my.yaml", device="0"), TrainConfig(data="/b/my.yaml", workers=2)
    assert describe_call(one) == describe_call(other) != describe_call(TrainConfig(data="/a/other.yaml"))
