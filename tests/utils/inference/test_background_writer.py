"""Tests of the background writer: order, errors and Ctrl-C."""

from __future__ import annotations

import threading
from pathlib import PurePath

import pytest

from tessera.utils.inference import outputs as outputs_module
from tessera.utils.inference.outputs import BackgroundWriter, Output
from tessera.utils.inference.results import Result
from tessera.utils.inference.sources.frames import Frame, SourceEvent
from tests.utils.inference.test_outputs import FRAME, result_of

ENDED = SourceEvent("a.jpg", "ended", "a.jpg: ended")


class Noted(Output):
    """Notes what it takes, waits where `go` is not set, and fails at the place that is called so."""

    def __init__(self) -> None:
        self.took, self.go = list[str](), threading.Event()
        self.go.set()

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        assert self.go.wait(10)
        if place.name == "full":
            raise OSError("the disk is full")
        self.took.append(place.name)

    def event(self, event: SourceEvent) -> None:
        self.took.append(event.kind)

    def close(self) -> None:
        self.took.append("closed")


def give(behind: BackgroundWriter, *places: object) -> None:
    for place in places:
        behind.add(result_of(FRAME), FRAME, PurePath(str(place)))


def test_everything_in_order_and_only_a_few_wait() -> None:
    before, outputs, given = threading.active_count(), (Noted(), Noted()), list[int]()
    outputs[0].go.clear()
    behind = BackgroundWriter(outputs)

    def run() -> None:
        for number in range(20):
            give(behind, number)
            given.append(number)
        behind.event(ENDED)
        give(behind, 20)

    giver = threading.Thread(target=run)
    giver.start()
    giver.join(0.3)
    assert len(given) <= 3
    outputs[0].go.set()
    giver.join(10)
    behind.close()
    for output in outputs:
        assert output.took == [*map(str, range(20)), "ended", "20", "closed"]
    assert threading.active_count() == before


@pytest.mark.parametrize("late", [False, True])
def test_an_error_is_raised_once_and_nothing_after_it_is_written(late: bool) -> None:
    """By the next results, or where there are none by closing."""
    outputs = (Noted(), Noted(), Noted())
    behind = BackgroundWriter(outputs)
    outputs[1].go.clear()
    give(behind, 0, "full", 2)
    outputs[1].go.set()
    if late:
        with pytest.raises(OSError, match="full"):
            behind.close()
    else:
        with pytest.raises(OSError, match="full"):
            give(behind, *range(3, 6))
        behind.close()
    assert [output.took for output in outputs] == [["0", "closed"]] * 3


def test_ctrl_c_while_it_waits_loses_neither_a_result_nor_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    whole, failing = Noted(), Noted()
    whole.go.clear()
    failing.go.clear()
    writing, broken = BackgroundWriter([whole]), BackgroundWriter([failing])
    give(writing, 0, 1, 2)
    give(broken, "full", 1, 2)
    monkeypatch.setattr(outputs_module, "wait", interrupt)
    for behind in (writing, broken):
        with pytest.raises(KeyboardInterrupt):
            give(behind, 3)
    whole.go.set()
    failing.go.set()
    writing.close()
    with pytest.raises(OSError, match="full"):
        broken.close()
    assert (whole.took, failing.took) == (["0", "1", "2", "3", "closed"], ["closed"])
