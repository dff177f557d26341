"""Readers of streams and cameras, one thread each, with timeouts and reconnection."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from tessera.deploy.inference.sources.frames import Frame, Kind, SourceEvent, VideoFacts
from tessera.deploy.inference.sources.source_arguments import Origin
from tessera.deploy.inference.sources.video import Capture, rgb_of
from tessera.utils.text import one_line, plural

MOST_WAITING = 8  # queued frames of a stream with --every-frame
_STALL_TIMES = 10  # times the usual time between two frames
_USUAL = 0.1  # weight of the newest frame in that time
_JOIN_S = 0.5  # a thread that waits for a server ends later
_LOOK_S = 1.0  # interval of checks for Ctrl-C


@dataclass(frozen=True)
class StreamTimeouts:
    """Timeouts and retries of a stream."""

    open_s: float = 10.0  # longest time to connect and receive the first frame
    read_s: float = 5.0  # longest time without a frame before reconnecting
    stall_s: float = 2.0  # shortest time without a frame that is reported as a gap, if it is ten times the usual one
    tries: int = 3  # connection attempts before the first frame; cameras have one
    pause_s: float = 0.5  # before another attempt; it doubles up to `longest_pause_s`
    longest_pause_s: float = 15.0
    give_up_s: float = 600.0  # time without a frame after which a stream ends


TIMEOUTS = StreamTimeouts()


class StreamReader(threading.Thread):
    """A thread that reads a stream until it is over or stopped.

    Args:
        origin: the stream or camera.
        ready: guards `waiting` and `is_over` of all readers, and is notified of changes.
        every_frame: block while the queue is full, instead of replacing the queued frame by a newer one.
        vid_stride: use each `vid_stride`-th frame.
    """

    def __init__(self, origin: Origin, ready: threading.Condition, *, every_frame: bool, vid_stride: int) -> None:
        super().__init__(name=f"stream {origin.place}", daemon=True)
        self.origin, self._timeouts = origin, TIMEOUTS
        self.waiting: deque[Frame | SourceEvent] = deque()  # queue of frames, in BGR, and events
        self.is_over = False  # no more items follow
        self.failure: BaseException | None = None  # exception that ended the thread
        self._ready, self._every_frame, self._vid_stride = ready, every_frame, vid_stride
        self._stopped = threading.Event()
        self._number = 0
        self._began: float | None = None  # arrival of the first frame
        self._last = 0.0  # arrival of the last frame

    def stop(self) -> None:
        """Stop the thread; it ends after its timeout at the latest."""
        self._stopped.set()
        with self._ready:
            self._ready.notify_all()

    def run(self) -> None:
        try:
            self._read()
        except BaseException as error:
            self.failure = error
        finally:
            with self._ready:
                self.is_over = True
                self._ready.notify_all()

    def _read(self) -> None:
        tries, pause = 0, self._timeouts.pause_s
        while not self._stopped.is_set():
            number = self._number
            facts = self._one_connection()
            if self._stopped.is_set():
                return
            if self._number > number:
                pause = self._timeouts.pause_s
                if facts is not None and facts.frames is not None:  # a finite stream
                    self._event("ended", f"ended after {plural(self._number, 'frame')}")
                    return
                self._event("gap", "no frame arrives, reconnecting", seconds=time.monotonic() - self._last)
            elif self._began is None:
                tries += 1
                if tries >= self._timeouts.tries or self.origin.form == "camera":
                    why = f"no frame arrived in {plural(tries, 'attempt')}. Check the URL and the network."
                    if self.origin.form == "camera":
                        why = f"camera {self.origin.where} delivers no image. Check its number and its connection."
                    self._event("unreadable", why)
                    return
            elif time.monotonic() - self._last > self._timeouts.give_up_s:
                lost_s = time.monotonic() - self._last
                self._event("ended", f"given up: no frame for {lost_s:.0f} s, after {plural(self._number, 'frame')}")
                return
            self._stopped.wait(pause)
            pause = min(2 * pause, self._timeouts.longest_pause_s)

    def _one_connection(self) -> VideoFacts | None:
        """Queue frames until none arrives; return the properties of the stream, None = no connection."""
        where = int(self.origin.where) if self.origin.form == "camera" else self.origin.where
        with Capture(where, open_s=self._timeouts.open_s, read_s=self._timeouts.read_s) as capture:
            if not capture.is_open:
                return None
            facts, is_new, usual_s = capture.facts, True, 0.0
            waiting_since = time.monotonic()
            while not self._stopped.is_set() and capture.grab():
                now = time.monotonic()
                if is_new:
                    self._report_connection(now, facts)
                else:
                    waited_s = now - waiting_since
                    if waited_s > max(self._timeouts.stall_s, _STALL_TIMES * usual_s):
                        self._event("gap", f"no frame for {waited_s:.1f} s", seconds=waited_s)
                    usual_s += _USUAL * (waited_s - usual_s) if usual_s else waited_s
                is_new, self._last = False, now
                if self._number % self._vid_stride == 0 and (pixels := capture.retrieve()) is not None:
                    time_s, wall_s = self._times(now)
                    source, place = self.origin.source, self.origin.place
                    self._put(Frame(pixels, source, "stream", place, self._number, time_s, wall_s))
                self._number += 1
                waiting_since = time.monotonic()
            return facts

    def _report_connection(self, now: float, facts: VideoFacts) -> None:
        if self._began is None:
            self._began = now
            self._event("opened", "opened", facts=facts)
        else:
            lost_s = now - self._last
            self._event("reconnected", f"reconnected after {lost_s:.1f} s", seconds=lost_s, facts=facts)

    def _put(self, frame: Frame) -> None:
        """Queue a frame, in place of an older one unless every frame is wanted."""
        with self._ready:
            if self._every_frame:
                while len(self.waiting) >= MOST_WAITING and not self._stopped.is_set():
                    self._ready.wait()
            elif self.waiting and isinstance(older := self.waiting[-1], Frame):
                self.waiting.pop()
                frame = replace(frame, dropped=older.dropped + 1)
            self.waiting.append(frame)
            self._ready.notify_all()

    def _event(
        self, kind: Kind, message: str, *, seconds: float | None = None, facts: VideoFacts | None = None
    ) -> None:
        origin, (time_s, wall_s) = self.origin, self._times(time.monotonic())
        line = f"{one_line(origin.source, 4096)}: {message}"
        event = SourceEvent(
            origin.source, kind, line, "stream", origin.place, self._number, time_s, wall_s, seconds, facts
        )
        with self._ready:
            self.waiting.append(event)
            self._ready.notify_all()

    def _times(self, now: float) -> tuple[float | None, float]:
        return None if self._began is None else now - self._began, time.time()


def read_streams(
    origins: Sequence[Origin], *, every_frame: bool, vid_stride: int
) -> Generator[Frame | SourceEvent, None, None]:
    """Yield frames and events of streams and cameras as they arrive; closing the generator ends their threads.

    `every_frame`: all frames in order, else the newest one of each stream.
    """
    ready = threading.Condition()
    readers = [StreamReader(origin, ready, every_frame=every_frame, vid_stride=vid_stride) for origin in origins]
    try:
        for reader in readers:
            reader.start()
        while (item := _next(readers, ready)) is not None:
            yield replace(item, pixels=rgb_of(item.pixels)) if isinstance(item, Frame) else item
            del item  # frees memory while waiting
    finally:
        for reader in readers:
            reader.stop()
        until = time.monotonic() + _JOIN_S
        for reader in readers:
            if reader.is_alive():
                reader.join(max(until - time.monotonic(), 0))


def _next(readers: list[StreamReader], ready: threading.Condition) -> Frame | SourceEvent | None:
    """Return the next item, from the streams in turn; None where all are over."""
    with ready:
        while True:
            for place, reader in enumerate(readers):
                if reader.waiting:
                    item = reader.waiting.popleft()
                    readers.append(readers.pop(place))  # the other streams are next
                    ready.notify_all()
                    return item
                if reader.failure is not None:
                    raise reader.failure
            if all(reader.is_over for reader in readers):
                return None
            ready.wait(_LOOK_S)
