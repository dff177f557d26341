"""Console: logging, tables, the bar of an epoch."""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from types import SimpleNamespace
from typing import Any, TextIO
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from tessera.analysis.report.advice import interval_line, speed_line
from tessera.utils.ranks.world import World
from tessera.utils.report.console import EpochBar, setup_logging, table_header, validation_line
from tessera.utils.text import table_row
from tessera.utils.types import Metrics


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    root.handlers[:] = before
    logging.captureWarnings(False)


def test_rank_0_is_heard_and_others_only_with_errors_and_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = logging.getLogger("tessera.data.source.index"), logging.getLogger("urllib3")

    def say() -> list[str]:
        ours.info("information")
        ours.warning("careful")
        ours.error("broken")
        theirs.warning("noise")
        theirs.error("their error")
        warnings.warn("python warns", UserWarning, stacklevel=1)
        out, err = capsys.readouterr()
        assert out == ""
        return [line for line in err.splitlines() if not line.startswith("  ")]

    with warnings.catch_warnings():
        setup_logging(0, 2)  # a run in a context whose end puts the hook of `warnings` back
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        setup_logging(0, 2)
        setup_logging(0, 2)  # a second run in the same process must not print everything twice
        *lines, python = say()
        assert lines == ["information", "WARNING: careful", "ERROR: broken", "ERROR: their error"]
        assert python.startswith("WARNING: ") and python.endswith("UserWarning: python warns")
        setup_logging(1, 2)
        assert say() == ["rank 1: ERROR: broken", "rank 1: ERROR: their error"]


METRICS = Metrics(
    precision=0.71234,
    recall=0.5,
    map50=0.6,
    map=0.4,
    class_ids=np.array([0, 2]),
    per_class=np.array([[0.9, 0.6, 0.8, 0.5], [0.52468, 0.4, 0.4, 0.3]]),
    images_per_class=np.array([3, 0, 2]),
    objects_per_class=np.array([7, 0, 2]),
    images=5,
    objects=9,
    confidence=0.3,
    class_confidences=np.array([0.25, 0.3, 0.41]),
)


def test_lines_are_aligned() -> None:
    named = dataclasses.replace(METRICS, names=("cat", "unused", "a name that is far too long to stand"))
    header, lines = table_header(), [table_row(*row) for row in named.rows()]
    assert header.split() == ["Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"]
    assert lines[0] == validation_line(METRICS)
    assert lines[0].split() == ["all", "5", "9", "0.712", "0.5", "0.6", "0.4"]
    assert lines[2].split()[-6:] == ["2", "2", "0.525", "0.4", "0.4", "0.3"] and "..." in lines[2]
    assert len(lines) == 3 and {len(line) for line in lines} == {len(header)}


def test_speed_and_interval_lines() -> None:
    assert speed_line((0.54, 3.2, 0.9), (32, 3, 640, 640)) == (
        "Speed: 0.5 ms preprocessing, 3.2 ms inference, 0.9 ms NMS per image at shape (32, 3, 640, 640)"
    )
    assert interval_line(METRICS, 0.351, 0.449) == (
        "mAP50-95 0.400, 95 % interval 0.351 to 0.449 (bootstrap over 5 images)"
    )
    nothing = dataclasses.replace(METRICS, map=0.0)
    assert interval_line(nothing, math.nan, math.nan) == ("mAP50-95 is undefined: no object in the labels of 5 images")


def test_metrics_print_as_a_small_table() -> None:
    header, everything, *classes = str(METRICS).splitlines()
    assert header.split("  ")[-1].strip() == "best conf" and len(header) == len(everything)
    assert everything.split() == ["all", "5", "9", "0.712", "0.5", "0.6", "0.4", "0.3"]
    assert [line.split() for line in classes] == [
        ["0", "3", "7", "0.9", "0.6", "0.8", "0.5", "0.25"],
        ["2", "2", "2", "0.525", "0.4", "0.4", "0.3", "0.41"],
    ]
    named = str(dataclasses.replace(METRICS, names=("cat", "unused", "dog"))).splitlines()
    assert [line.split()[0] for line in named] == ["class", "all", "cat", "dog"]
    many = dataclasses.replace(METRICS, class_ids=np.arange(21), per_class=np.zeros((21, 4)))
    assert str(many).splitlines() == [header, everything]


NAMES = ("box", "obj", "cls")
COLUMNS = ("Epoch", "GPU_mem", "box_loss", "obj_loss", "cls_loss", "Instances", "Size", "Data_wait")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def training(rank: int = 0) -> Any:
    """A run of ten epochs."""
    world = World()
    world.rank = rank
    config, progress = SimpleNamespace(epochs=10), SimpleNamespace(batch_in_epoch=0)
    return SimpleNamespace(
        context=SimpleNamespace(world=world, config=config),
        state=SimpleNamespace(progress=progress),
        criterion=SimpleNamespace(names=NAMES),
    )


def run_epoch(stream: TextIO, rank: int = 0, steps: int = 50) -> EpochBar:
    with redirect_stderr(stream), EpochBar(3, steps, training(rank)) as bar:
        for step in bar.timed(range(steps)):
            bar.update(1, torch.tensor([0.1, 0.02, 0.003]) * (step + 1), 17, 640)
    return bar


def test_a_log_file_gets_a_header_and_one_plain_line() -> None:
    stream = io.StringIO()
    run_epoch(stream)
    header, line = stream.getvalue().splitlines()
    assert header.split() == list(COLUMNS)
    assert line.split()[:7] == ["3/9", "0G", "5", "1", "0.15", "17", "640"]
    assert "50/50" in line
    assert not set(stream.getvalue()) & {"\r", "\x1b"}


def test_a_terminal_without_a_width_gets_plain_lines() -> None:
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal, os.fdopen(reader) as screen:
        run_epoch(terminal)
        terminal.flush()
        assert screen.readline().split() == list(COLUMNS)
        assert "50/50" in screen.readline()


def test_a_terminal_gets_a_moving_bar_that_ends_with_the_last_figures() -> None:
    stream = Terminal()
    run_epoch(stream)
    last = stream.getvalue().rstrip("\n").rpartition("\r")[2]
    assert "50/50" in last and "100%" in last and last.split()[2:5] == ["5", "1", "0.15"]


def test_other_ranks_print_nothing_but_measure() -> None:
    for stream in (io.StringIO(), Terminal()):
        assert run_epoch(stream, rank=1).done == 50
        assert stream.getvalue() == ""


def test_losses_are_not_read_at_every_step() -> None:
    losses = MagicMock(**{"tolist.return_value": [1.0, 2.0, 3.0]})
    with redirect_stderr(Terminal()), EpochBar(0, 1000, training()) as bar:
        for _ in range(1000):
            bar.update(1, losses, 1, 64)
    assert 1 <= losses.tolist.call_count <= 20


def test_data_wait_is_the_share_of_time_spent_on_batches() -> None:
    def slow() -> Iterator[int]:
        for i in range(5):
            time.sleep(0.03)
            yield i

    with EpochBar(0, 5, training()) as bar:
        for _ in bar.timed(slow()):
            time.sleep(0.01)
            bar.update(1, torch.zeros(3), 0, 64)
        assert bar.wait_s >= 0.15
        assert bar.data_wait == pytest.approx(bar.wait_s / bar.seconds, rel=0.1)
        assert 0 < bar.data_wait < 1
    taken = bar.seconds, bar.data_wait
    time.sleep(0.01)
    assert (bar.seconds, bar.data_wait) == taken  # what follows the epoch does not count


def test_an_epoch_that_fails_prints_no_figures_and_does_not_wait_for_the_device() -> None:
    stream, accelerator = io.StringIO(), MagicMock(memory_gib=lambda: 0)
    made = training()
    made.context.world = World(accelerator=accelerator)
    with pytest.raises(RuntimeError), redirect_stderr(stream), EpochBar(0, 5, made) as bar:
        bar.update(1, torch.ones(3), 0, 64)
        raise RuntimeError
    assert len(stream.getvalue().splitlines()) == 1 and not accelerator.synchronize.called
