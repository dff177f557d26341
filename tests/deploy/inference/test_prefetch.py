"""Tests of prefetching: order, errors and ends of threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from tessera.deploy.inference.detector import detect_ahead, prefetch


def test_the_same_items_in_order_and_an_error_after_them() -> None:
    made_in = set()

    def items() -> Iterator[int]:
        for number in range(100):
            made_in.add(threading.current_thread().name)
            yield number
        raise OSError("gone")

    with prefetch(items()) as ahead:
        assert list(itertools.islice(ahead, 100)) == list(range(100))
        with pytest.raises(OSError, match="gone"):
            next(ahead)
    assert made_in == {"prefetch_0"}


def test_no_more_than_a_few_are_made_and_the_thread_ends() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    before = threading.active_count()
    with prefetch(items()) as ahead:
        for number in ahead:
            assert len(made) <= number + 4
            if number == 10:
                break
    assert threading.active_count() == before and len(made) < 20
    with prefetch(items()):
        pass  # never begun


@pytest.mark.parametrize("of_items", [False, True])
@pytest.mark.parametrize("at_once", [1, 3])
def test_detections_come_in_the_order_of_the_items(at_once: int, of_items: bool) -> None:
    """And so does an error, of the items or of what is done with one; no more is begun than a few."""
    barrier, begun = threading.Barrier(at_once), list[int]()

    def items() -> Iterator[int]:
        for number in itertools.count():
            if of_items and number == 20:
                raise OSError("gone")
            yield number

    def find(number: int) -> int:
        begun.append(number)
        if number < 9:
            barrier.wait(10)  # as many are at work at once
        if number == 20:
            raise OSError("gone")
        return -number

    before = threading.active_count()
    with detect_ahead(items(), find, at_once) as found:
        assert [next(found) for _ in range(20)] == [(number, -number) for number in range(20)]
        with pytest.raises(OSError, match="gone"):
            next(found)
    assert max(begun) <= 20 + at_once
    for thread in threading.enumerate():
        if thread.name.startswith("detection"):
            thread.join(10)
    assert threading.active_count() == before
