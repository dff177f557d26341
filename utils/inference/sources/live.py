"""Several streams side by side, as one iterator: each gets its turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import replace

from tessera.utils.inference.sources.capture import rgb_of
from tessera.utils.inference.sources.frames import Frame, SourceEvent
from tessera.utils.inference.sources.origins import Origin
from tessera.utils.inference.sources.stream import StreamReader

_JOIN_S = 0.5  # a thread that waits for a server ends by itself later
_LOOK_S = 1.0  # how often Ctrl-C is looked for where nothing comes


def read_streams(
    origins: Sequence[Origin], *, every_frame: bool, vid_stride: int
) -> Generator[Frame | SourceEvent, None, None]:
    """Frames and events of streams as they come, until all of them are over; closing it ends their threads.

    Args:
        origins: streams and cameras.
        every_frame: all frames in order, else the newest one of each stream.
        vid_stride: each so many-th frame of a stream.
    """
    ready = threading.Condition()
    readers = [StreamReader(origin, ready, every_frame=every_frame, vid_stride=vid_stride) for origin in origins]
    try:
        for reader in readers:
            reader.start()
        while (item := _next(readers, ready)) is not None:
            yield replace(item, pixels=rgb_of(item.pixels)) if isinstance(item, Frame) else item
            del item  # nothing is kept while the next one is awaited
    finally:
        for reader in readers:
            reader.stop()
        until = time.monotonic() + _JOIN_S
        for reader in readers:
            reader.join(max(until - time.monotonic(), 0))


def _next(readers: list[StreamReader], ready: threading.Condition) -> Frame | SourceEvent | None:
    """What waits longest for its turn; None where all streams are over."""
    with ready:
        while True:
            for place, reader in enumerate(readers):
                if reader.waiting:
                    item = reader.waiting.popleft()
                    readers.append(readers.pop(place))  # the others come first next time
                    ready.notify_all()
                    return item
                if reader.failure is not None:
                    raise reader.failure
            if all(reader.is_over for reader in readers):
                return None
            ready.wait(_LOOK_S)
