"""Items come from a thread as they would come without it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tessera.utils.inference.ahead import read_ahead


def test_the_same_items_in_order() -> None:
    made_in = set()

    def items() -> Iterator[int]:
        for number in range(100):
            made_in.add(threading.current_thread().name)
            yield number

    with read_ahead(items()) as ahead:
        assert list(ahead) == list(range(100))
    assert made_in == {"reading ahead_0"}


def test_an_error_comes_where_it_would() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    with read_ahead(items()) as ahead:
        assert next(ahead) == 1
        with pytest.raises(OSError, match="gone"):
            next(ahead)


def test_no_more_than_a_few_are_made_and_the_thread_ends() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    before = threading.active_count()
    with read_ahead(items()) as ahead:
        for number in ahead:
            assert len(made) <= number + 4
            if number == 10:
                break
    assert threading.active_count() == before and len(made) < 20
    with read_ahead(items()):
        pass  # never begun
