"""A forked process that runs a function and sends its result."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

FORK = multiprocessing.get_context("fork")


def in_another_process(work: Callable[[Connection], Any]) -> Any:
    with another_process(work) as (_, pipe):
        assert pipe.poll(30)
        return pipe.recv()


class another_process:
    """A forked process that sends what `work` returns; ended by its id on leaving."""

    def __init__(self, work: Callable[[Connection], Any]) -> None:
        self._pipe, self._other = FORK.Pipe()
        self._process = FORK.Process(target=lambda: self._other.send(work(self._other)))

    def __enter__(self) -> tuple[Any, Connection]:
        self._process.start()
        self._other.close()  # so that a process that ends is noticed where it is waited for
        return self._process, self._pipe

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
