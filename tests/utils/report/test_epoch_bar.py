"""Output of an epoch on a terminal, in a log file, and on other ranks."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import TextIO
from unittest.mock import MagicMock

import pytest
import torch

from tessera.utils.ranks.world import World
from tessera.utils.report.console import EpochBar

NAMES = ("box", "obj", "cls")
COLUMNS = ("Epoch", "GPU_mem", "box_loss", "obj_loss", "cls_loss", "Instances", "Size", "Data_wait")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def world(rank: int = 0) -> World:
    made = World()
    made.rank = rank
    return made


def run_epoch(stream: TextIO, rank: int = 0, steps: int = 50) -> EpochBar:
    with redirect_stderr(stream), EpochBar("3/9", steps, world(rank), NAMES) as bar:
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
    losses = MagicMock(**{"__iter__.side_effect": lambda: iter((1.0, 2.0, 3.0))})
    with redirect_stderr(Terminal()), EpochBar("0/0", 1000, world(), NAMES) as bar:
        for _ in range(1000):
            bar.update(1, losses, 1, 64)
    assert 1 <= losses.__iter__.call_count <= 20


def test_data_wait_is_the_share_of_time_spent_on_batches() -> None:
    def slow() -> Iterator[int]:
        for i in range(5):
            time.sleep(0.03)
            yield i

    with EpochBar("0/0", 5, world(), NAMES) as bar:
        for _ in bar.timed(slow()):
            time.sleep(0.01)
            bar.update(1, [0.0, 0.0, 0.0], 0, 64)
        assert bar.wait_s >= 0.15
        assert bar.data_wait == pytest.approx(bar.wait_s / bar.seconds, rel=0.1)
        assert 0 < bar.data_wait < 1
    taken = bar.seconds, bar.data_wait
    time.sleep(0.01)
    assert (bar.seconds, bar.data_wait) == taken  # what follows the epoch does not count


def test_an_epoch_that_fails_prints_no_figures_and_does_not_wait_for_the_device() -> None:
    stream, accelerator = io.StringIO(), MagicMock(memory_gib=lambda: 0)
    made = World(accelerator=accelerator)
    with pytest.raises(RuntimeError), redirect_stderr(stream), EpochBar("0/0", 5, made, NAMES) as bar:
        bar.update(1, [1.0, 1.0, 1.0], 0, 64)
        raise RuntimeError
    assert len(stream.getvalue().splitlines()) == 1 and not accelerator.synchronize.called
