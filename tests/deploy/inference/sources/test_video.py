"""Tests of video files: numbers, times, rotation, and truncated or damaged files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import pytest

from tessera.deploy.inference.sources.frames import SourceEvent
from tessera.deploy.inference.sources.sources import open_sources
from tests.data.make import write_image
from tests.deploy.inference.sources.made_sources import (
    HEIGHT,
    WIDTH,
    events,
    frames,
    items,
    kinds,
    number_of,
    read,
    write_video,
)
from tests.raw_server import raw_server

FRAME_S = 0.1


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with videos of 40 frames, 10 a second."""
    folder = tmp_path_factory.mktemp("videos")
    write_video(folder / "a.mp4", range(40))
    write_video(folder / "a.avi", range(40), codec="MJPG")
    return folder


@pytest.fixture(scope="module")
def ffmpeg() -> str:
    found = shutil.which("ffmpeg")
    if found is None:
        pytest.skip("needs the program ffmpeg, which is not installed")
    return found


def convert(ffmpeg: str, source: Path, target: Path, *flags: str) -> Path:
    subprocess.run([ffmpeg, "-nostdin", "-loglevel", "error", "-y", "-i", source, *flags, target], check=True)
    return target


@pytest.mark.parametrize(("name", "stride"), [("a.mp4", 1), ("a.avi", 1), ("a.mp4", 7)])
def test_frames_are_numbered_and_timed(made: Path, name: str, stride: int) -> None:
    found, numbers = items(made / name, vid_stride=stride), list(range(0, 40, stride))
    assert kinds(found) == ["opened", "ended"]
    facts = events(found)[0].facts
    assert facts is not None and (facts.size_hw, facts.frames, facts.fps) == ((HEIGHT, WIDTH), 40, pytest.approx(10))
    got = frames(found)
    assert [frame.frame for frame in got] == [number_of(frame.pixels) for frame in got] == numbers
    assert [frame.time_s for frame in got] == pytest.approx([n * FRAME_S for n in numbers], abs=1e-3)
    assert {(frame.source, frame.name.name, frame.media, frame.wall_s) for frame in got} == {
        (str(made / name), name, "video", None)
    }


def test_times_are_those_of_the_file_not_number_by_rate(ffmpeg: str, made: Path, tmp_path: Path) -> None:
    """Frames 5 to 19 are cut out, and the others keep their times: a variable frame rate."""
    cut = "select='not(between(n,5,19))'"
    for suffix in (".mp4", ".mkv"):
        path = convert(ffmpeg, made / "a.mp4", tmp_path / f"v{suffix}", "-vf", cut, "-vsync", "vfr")
        found = items(path)
        got = frames(found)
        numbers = [*range(5), *range(20, 40)]
        assert [number_of(frame.pixels) for frame in got] == numbers
        assert [frame.frame for frame in got] == list(range(25)), "frames of the file"
        assert [frame.time_s for frame in got] == pytest.approx([n * FRAME_S for n in numbers], abs=2e-3)
        assert kinds(found) == ["opened", "ended"]


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_rotation_is_applied_once(ffmpeg: str, made: Path, tmp_path: Path, degrees: int) -> None:
    """Its metadata asks a player for quarters of a turn; ffmpeg's own decoder, which turns, is the oracle."""
    flags = ("-frames:v", "4", "-c", "copy", "-metadata:s:v:0", f"rotate={degrees}")
    path = convert(ffmpeg, made / "a.mp4", tmp_path / "turned.mp4", *flags)
    probe = subprocess.run([ffmpeg, "-nostdin", "-i", path], capture_output=True, text=True, check=False).stderr
    if "rotat" not in probe:
        pytest.skip("this ffmpeg writes no rotation")
    convert(ffmpeg, path, tmp_path / "%d.png")
    found = items(path)
    facts = events(found)[0].facts
    shown = [cv2.imread(str(tmp_path / f"{n}.png"))[..., ::-1] for n in range(1, 5)]
    assert facts is not None and facts.size_hw == shown[0].shape[:2]
    assert shown[0].shape[:2] == ((HEIGHT, WIDTH) if degrees == 180 else (WIDTH, HEIGHT))
    got = frames(found)
    assert len(got) == 4
    for frame, expected in zip(got, shown, strict=True):
        assert frame.pixels.shape == expected.shape
        assert np.abs(frame.pixels.astype(int) - expected).mean() < 3


def test_a_video_that_ends_in_garbage(made: Path, tmp_path: Path) -> None:
    content = bytearray((made / "a.avi").read_bytes())
    start = len(content) * 6 // 10
    content[start:] = np.random.default_rng(0).integers(0, 256, len(content) - start, np.uint8).tobytes()
    (tmp_path / "a.avi").write_bytes(content)
    write_image(tmp_path / "b.jpg")
    found = items(tmp_path)
    assert kinds(found) == ["opened", "damaged"] and events(found)[1].is_failure
    video = [frame for frame in frames(found) if frame.media == "video"]
    assert 10 < len(video) < 40
    assert [frame.frame for frame in video] == list(range(len(video)))
    assert [number_of(frame.pixels) for frame in video[:10]] == list(range(10))
    assert f"ends after {len(video)} frames, at" in events(found)[1].message
    assert frames(found)[-1].name.name == "b.jpg", "the rest goes on"


def test_a_video_that_is_cut_short(ffmpeg: str, made: Path, tmp_path: Path) -> None:
    """Its header, which lies in front, states all its frames; with B-frames it has an edit list."""
    flags = ("-c:v", "libx264", "-bf", "3", "-g", "10", "-movflags", "faststart")
    path = convert(ffmpeg, made / "a.mp4", tmp_path / "a.mp4", *flags)
    os.truncate(path, path.stat().st_size * 9 // 10)
    found = items(path)
    assert kinds(found) == ["opened", "damaged"] and 5 < len(frames(found)) < 38
    assert [number_of(frame.pixels) for frame in frames(found)[:5]] == list(range(5))


def test_a_clip_trimmed_without_coding_it_anew_is_whole(ffmpeg: str, made: Path, tmp_path: Path) -> None:
    """It has more frames than it shows."""
    long, path = convert(ffmpeg, made / "a.mp4", tmp_path / "long.mp4", "-g", "30"), tmp_path / "trimmed.mp4"
    subprocess.run([ffmpeg, "-loglevel", "error", "-ss", "2", "-i", long, "-c", "copy", path], check=True)
    found = items(path)
    assert kinds(found) == ["opened", "ended"]
    got = frames(found)
    facts = events(found)[0].facts
    assert facts is not None and facts.frames is not None and facts.frames > len(got) + 10
    assert number_of(got[-1].pixels) == 39


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found 0 bytes that do not decode"),
        (bytes(5000), "found 5,000 bytes that do not decode"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + bytes(5000), "bytes that do not decode"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom\0\0\0\x01moov\xff\xff\xff\xff\xff\xff\xff\xff", "do not decode"),
    ],
)  # fmt: skip
def test_files_that_are_no_video(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(content)
    (event,) = items(tmp_path / "a.mp4")
    assert isinstance(event, SourceEvent) and event.kind == "unreadable" and message in event.message
    assert len(event.message.splitlines()) == 1


def changed(made: Path, path: Path, *numbers: tuple[bytes, int, int]) -> Path:
    """A copy of a video with other numbers in its header: a box, the number's place from its name on, and itself."""
    content = bytearray(made.read_bytes())
    for box, offset, number in numbers:
        at = content.index(box) + offset
        content[at : at + 4] = number.to_bytes(4, "big")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("damage", [(b"elst", -4, 8), (b"mdhd", 16, 0xFFFFFFFF), (b"stts", 16, 0x7FFFFFFF)])
def test_a_header_that_lies_ends_nothing_else(made: Path, tmp_path: Path, damage: tuple[bytes, int, int]) -> None:
    """An edit list without content, or wrong times; and a frame that is larger than the file."""
    changed(made / "a.mp4", tmp_path / "a.mp4", damage, (b"stsz", 16 + 4 * 10, 0x7FFFFFFF))
    write_image(tmp_path / "b.jpg")
    found = items(tmp_path)
    assert kinds(found) == ["opened", "damaged"] and frames(found)[-1].name.name == "b.jpg"


QUIET = """
import sys
from tessera.deploy.inference.sources.source_arguments import Origin
from tessera.deploy.inference.sources.video import read_video
for path in sys.argv[1:]:
    print([item.kind for item in read_video(Origin("video", path)) if hasattr(item, "kind")])
"""


@pytest.mark.slow
def test_the_libraries_print_nothing(made: Path, tmp_path: Path) -> None:
    """In a process of its own: they read what they may print when they are loaded."""
    content = bytearray((made / "a.mp4").read_bytes())
    for at in range(200, len(content) - 3000, 50):
        content[at] ^= 0xFF
    (tmp_path / "a.mp4").write_bytes(content)
    (tmp_path / "b.mp4").write_bytes(bytes(5000))
    command = [sys.executable, "-c", QUIET, tmp_path / "a.mp4", tmp_path / "b.mp4", tmp_path / "none.mp4"]
    done = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    first, *others = done.stdout.splitlines()
    assert first.startswith("['opened', ") and others == ["['unreadable']"] * 2


def test_a_playlist_in_a_video_s_clothes_reaches_no_server(tmp_path: Path) -> None:
    """FFmpeg knows a playlist by its content; only an address that was given may be asked for anything."""
    with raw_server([b"HTTP/1.1 404 no\r\n\r\n"]) as server:
        playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{server.url}/a.ts\n#EXT-X-ENDLIST\n"
        concat = f"ffconcat version 1.0\nfile '{server.url}/a.ts'\n"
        for name, text in (("a.mp4", playlist), ("b.ts", playlist), ("c.mp4", concat), ("d.avi", concat)):
            (tmp_path / name).write_text(text)
        assert {event.kind for event in events(items(tmp_path))} == {"unreadable"}
        assert server.requests == []


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_closing_releases_the_file(made: Path) -> None:
    def is_open() -> bool:
        return any(os.path.realpath(link) == str(made / "a.mp4") for link in Path("/proc/self/fd").iterdir())

    with open_sources(made / "a.mp4", read=read) as sources:
        assert len(list(islice(iter(sources), 3))) == 3 and is_open()
    assert not is_open()


def test_a_name_that_ffmpeg_could_take_for_something_else(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or that is no UTF-8: OpenCV 5 ends the process on it."""
    monkeypatch.chdir(tmp_path)
    for name in ("http:a.mp4", "%03d.avi", "pipe:0.mp4", "é ü.mp4", "\udcff.mp4"):
        shutil.copy(made / ("a.avi" if name.endswith("avi") else "a.mp4"), name)
        assert len(frames(items(name))) == 40, name
