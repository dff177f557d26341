"""Tests of streams that stall, break off and return; each frame carries its number."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tessera.deploy.inference.sources import stream
from tessera.deploy.inference.sources.frames import Frame, SourceEvent
from tessera.deploy.inference.sources.sources import open_sources
from tessera.deploy.inference.sources.stream import StreamTimeouts
from tests.data.make import write_image
from tests.deploy.inference.sources.made_sources import (
    REFUSE,
    events,
    frames,
    items,
    kinds,
    mjpeg_server,
    number_of,
    read,
    write_video,
)

SILENT = 600.0
READ_S = 2.0


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets time-outs of streams; without a call they are long, and pauses short."""

    def let(**seconds: float) -> None:
        usual = StreamTimeouts(open_s=60, read_s=60, stall_s=30, pause_s=0.01, longest_pause_s=0.05, give_up_s=60)
        monkeypatch.setattr(stream, "TIMEOUTS", replace(usual, **seconds))

    let()
    return let


def items_until(source: str | Path, most_frames: int, least_events: int = 0) -> list[Frame | SourceEvent]:
    """All that comes, every frame, until there are so many."""
    found: list[Frame | SourceEvent] = []
    with open_sources(source, read=read, every_frame=True) as sources:
        for item in sources:
            found.append(item)
            if len(frames(found)) == most_frames and len(events(found)) >= least_events:
                break
    return found


def test_every_frame_in_order_through_stall_break_and_return(limits: Callable[..., None]) -> None:
    """It stalls for 3 s, which is too long, and the server has gone when it is called again, and comes back."""
    limits(read_s=READ_S)
    with mjpeg_server([20, 3.0, 1], REFUSE, REFUSE, [20, SILENT]) as server:
        found = items_until(server.url, 40)
        assert server.connections == 4
    assert kinds(found) == ["opened", "gap", "reconnected"]
    opened, gap, reconnected = events(found)
    got = frames(found)
    assert [frame.frame for frame in got] == list(range(40)), "numbers go on"
    assert gap.frame == reconnected.frame == 20 and gap.seconds is not None and gap.seconds >= READ_S * 0.9
    assert reconnected.seconds is not None and reconnected.seconds >= gap.seconds
    written = [number_of(frame.pixels) for frame in got]
    assert written[:20] == list(range(20)) and np.diff(written[20:]).tolist() == [1] * 19 and written[20] >= 20
    order = [item.kind if isinstance(item, SourceEvent) else item.frame for item in found]
    assert order == ["opened", *range(20), "gap", "reconnected", *range(20, 40)]
    times = [frame.time_s for frame in got if frame.time_s is not None]
    assert times[0] == 0 and times == sorted(times) and times[20] - times[19] >= READ_S * 0.9
    assert all(frame.wall_s is not None and abs(frame.wall_s - time.time()) < 600 for frame in got)
    assert {(frame.source, frame.media, frame.dropped) for frame in got} == {(server.url, "stream", 0)}
    assert opened.facts is not None and opened.facts.size_hw == got[0].pixels.shape[:2]
    line = gap.to_dict()
    assert line["event"] == "gap" and line["frame"] == 20 and {"time_s", "wall_s", "seconds", "message"} <= set(line)


def test_a_short_stall_is_a_gap_without_a_new_connection(limits: Callable[..., None]) -> None:
    limits(stall_s=0.4)
    with mjpeg_server([20, 1.5, 10, SILENT]) as server:
        found = items_until(server.url, 30)
        assert server.connections == 1
    assert "gap" in kinds(found) and "reconnected" not in kinds(found)
    assert [frame.frame for frame in frames(found)] == [number_of(frame.pixels) for frame in frames(found)]
    (gap,) = (event for event in events(found) if event.frame == 20 and event.kind == "gap")
    assert gap.seconds is not None and gap.seconds > 0.4


def test_the_newest_frame_and_how_many_were_dropped() -> None:
    with mjpeg_server([100, SILENT], pause_s=0.001) as server:
        got = []
        with open_sources(server.url, read=read) as sources:
            for item in sources:
                if isinstance(item, Frame):
                    got.append(item)
                    time.sleep(0.05)
                    if item.frame == 99:
                        break
    assert [frame.frame for frame in got] == [number_of(frame.pixels) for frame in got]
    assert all(second.frame - first.frame == second.dropped + 1 for first, second in pairwise(got))
    assert sum(frame.dropped + 1 for frame in got) == 100 and len(got) < 100


def test_whoever_wants_every_frame_is_waited_for() -> None:
    with mjpeg_server([60, SILENT], pause_s=0.001) as server:
        got = []
        with open_sources(server.url, read=read, every_frame=True, vid_stride=2) as sources:
            for frame in sources:
                if isinstance(frame, Frame):
                    got.append(frame)
                    time.sleep(0.01)
                    if len(got) == 30:
                        break
    assert [frame.frame for frame in got] == [number_of(frame.pixels) for frame in got] == list(range(0, 60, 2))
    assert all(frame.dropped == 0 for frame in got)


def test_a_stream_that_does_not_come_back_is_given_up(limits: Callable[..., None]) -> None:
    limits(give_up_s=0.3)
    with mjpeg_server([5]) as server:
        found = items(server.url, every_frame=True)
    assert kinds(found) == ["opened", "gap", "ended"] and not any(event.is_failure for event in events(found))
    assert "given up" in events(found)[-1].message and len(frames(found)) == 5


def test_a_stream_that_never_comes_is_unreadable(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"rtsp://me:secret@127.0.0.1:{taken.getsockname()[1]}/live"
        write_image(tmp_path / "a.jpg")
        found = items([address, tmp_path / "a.jpg"])
    assert [isinstance(item, Frame) for item in found] == [True, False], "files first"
    (event,) = events(found)
    assert event.kind == "unreadable" and "in 3 attempts" in event.message
    assert "me:***@127.0.0.1" in event.source and "secret" not in event.message + event.source + str(event.name)


def test_a_camera_that_is_not_there() -> None:
    (event,) = items("9763")
    assert isinstance(event, SourceEvent) and event.kind == "unreadable" and event.source == "9763"
    assert "camera 9763 delivers no image" in event.message


def test_several_streams_of_a_list_each_get_their_turn(tmp_path: Path) -> None:
    with mjpeg_server([30, SILENT]) as one, mjpeg_server([30, SILENT]) as two, mjpeg_server() as gone:
        (tmp_path / "a.streams").write_text(f"{one.url}\n# the second\n{two.url}\n\n{gone.url}\n")
        found = items_until(tmp_path / "a.streams", 60, 3)
    for server in (one, two):
        got = [item for item in frames(found) if item.source == server.url]
        assert [frame.frame for frame in got] == [number_of(frame.pixels) for frame in got] == list(range(30))
    assert {event.kind for event in events(found) if event.source == gone.url} == {"unreadable"}
    names = {item.name for item in found}
    assert len(names) == 3 and not any(name.suffix for name in names), "the addresses differ in their ports alone"


def test_closing_ends_the_threads() -> None:
    with mjpeg_server([30, SILENT], pause_s=0.02) as server:
        before = threading.active_count()
        with open_sources(server.url, read=read) as sources:
            found = iter(sources)
            while not isinstance(next(found), Frame):
                pass
            assert threading.active_count() > before
        until = time.monotonic() + 60
        while any(thread.name.startswith("stream ") for thread in threading.enumerate()):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert next(found, None) is None


def test_transport_stream_over_tcp(tmp_path: Path, limits: Callable[..., None]) -> None:
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None:
        pytest.skip("needs the program ffmpeg, which is not installed")
    video = write_video(tmp_path / "a.mp4", range(30))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["-c:v", "mpeg2video", "-q:v", "2", "-f", "mpegts", f"tcp://127.0.0.1:{port}?listen=1"]
    with subprocess.Popen([ffmpeg, "-nostdin", "-loglevel", "quiet", "-i", video, *flags]) as server:
        limits(tries=600, pause_s=0.1, longest_pause_s=0.1, give_up_s=0.1)
        found = items(f"tcp://127.0.0.1:{port}", every_frame=True)
        assert server.wait(60) == 0
    got = frames(found)
    assert kinds(found) == ["opened", "gap", "ended"]
    assert [frame.frame for frame in got] == list(range(len(got)))
    assert [number_of(frame.pixels) for frame in got] == list(range(30))
