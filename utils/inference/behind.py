"""What was found is drawn, encoded and written in a thread, while what comes next is looked at."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import PurePath

from tessera.utils.inference.outputs import Output
from tessera.utils.inference.results import Result
from tessera.utils.inference.sources.frames import Frame, SourceEvent

_WAITING = 3  # results, with their pictures, that are not written yet


class Behind(Output):
    """Several outputs, in one thread: each takes everything in the order in which it comes here.

    What an output raises is raised by one of the next calls, once; nothing that came after it is written.
    """

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._outputs = outputs
        self._pool = ThreadPoolExecutor(1, "writing")
        self._waiting: deque[Future[None]] = deque()
        self._is_whole = True

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        """As Output; waits while too much is not written yet."""
        self._give(lambda output: output.add(result, frame, place))

    def event(self, event: SourceEvent) -> None:
        """As Output."""
        self._give(lambda output: output.event(event))

    def close(self) -> None:
        """As Output, after what waits is written."""
        with ExitStack() as stack:
            for output in self._outputs:
                stack.callback(output.close)
            stack.callback(self._pool.shutdown)
            while self._waiting:
                self._waiting.popleft().result()

    def _give(self, act: Callable[[Output], None]) -> None:
        self._waiting.append(self._pool.submit(self._each, act))
        if len(self._waiting) > _WAITING:
            wait([self._waiting[0]])  # what Ctrl-C ends here is written all the same, and its error comes by closing
            self._waiting.popleft().result()

    def _each(self, act: Callable[[Output], None]) -> None:
        if self._is_whole:
            self._is_whole = False  # unless all of them have taken it
            for output in self._outputs:
                act(output)
            self._is_whole = True
