"""What docs/distributed.md says is so: its table of the sampler's law, the tests that it names, the flags it uses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from data.feed.sampler import EpochOrder, EpochSampler
from utils import environment
from utils.config import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "distributed.md").read_text()


def law(images: int, drop_last: bool) -> str:
    """A row of the page's table: two ranks, 4 images a batch over both, seed 0."""
    samplers = [EpochSampler(EpochOrder(images, 4, 0, 64, drop_last=drop_last), r, 2) for r in range(2)]
    counts = {sum(len(batch) for batch in sampler) for sampler in samplers}
    assert len(counts) == 1, "equal on all ranks"
    orders = [shown(samplers[0].order.plan(epoch)[0].tolist(), images) for epoch in range(2)]
    kind = "dropped" if drop_last else "filled"
    return f"| {images} | {kind} | {len(samplers[0])} | {counts.pop()} | {orders[0]} | {orders[1]} |"


def shown(order: list[int], images: int) -> str:
    """Batches with the ranks' shares between slashes; images that fill up in brackets."""
    words = [str(image) if place < images else f"({image})" for place, image in enumerate(order)]
    batches = [words[start : start + 4] for start in range(0, len(words), 4)]
    return ", ".join(f"{' '.join(batch[:2])} / {' '.join(batch[2:])}" for batch in batches)


@pytest.mark.parametrize("drop_last", [False, True], ids=["filled", "dropped"])
@pytest.mark.parametrize("images", [8, 6, 5, 10])
def test_the_table_of_the_samplers_law(images: int, drop_last: bool) -> None:
    assert law(images, drop_last) in PAGE.splitlines()


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert named
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_every_command_is_understood() -> None:
    text = PAGE.replace("\\\n", " ")
    commands = re.findall(r"^.*\btrain\.py (--.*)$", text, flags=re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        if "$flags" not in command and "`" not in command:
            TrainConfig(**TrainConfig.from_args(shlex.split(command)))


def test_variables_are_those_that_are_read() -> None:
    read = set(re.findall(r"TESSERA_\w+", Path(environment.__file__).read_text()))
    assert set(re.findall(r"TESSERA_\w+", PAGE)) == read
