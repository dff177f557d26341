"""Tests of tracking: ids follow moving objects, differ per source and end at gaps; detections do not change."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tessera.commands import detect
from tessera.deploy.inference.detector import Detector
from tessera.deploy.inference.results import Result
from tessera.deploy.inference.sources.frames import SourceEvent
from tessera.deploy.inference.tracking import Tracking
from tessera.deploy.inference.video_writer import VideoWriter
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.types import Detections
from tests.deploy.exporting.made import ANCHORED, checkpoint, made_image
from tests.deploy.runtime.made_files import detector_of

ROOT = Path(__file__).resolve().parents[3]
SIZE, WIDTH, HEIGHT = 24, 240, 160
Boxes = list[tuple[int, int, int]]  # left, top, channel of the colour
needs_trackers = pytest.mark.skipif(find_spec("trackers") is None, reason="the package trackers is not installed")


def squares(image: NDArray[np.uint8]) -> Detections:
    """Find the red, the green and the blue square; red and green ones are of one class."""
    found = []
    for channel in range(3):
        ys, xs = np.nonzero(image[..., channel].astype(int) - image.min(axis=2) > 100)
        if len(xs) > 50:
            found.append((xs.min(), ys.min(), xs.max() + 1, ys.max() + 1, 0.9 - channel / 10, channel // 2))
    table = torch.tensor(np.array(found, np.float32).reshape(-1, 6))
    return Detections(table[:, :4], table[:, 4], table[:, 5].long())


def detector() -> Detector:
    return Detector(detector_of(squares, ("warm", "blue"), 256, threshold=0.5))


def drawn(boxes: Boxes) -> NDArray[np.uint8]:
    pixels = np.full((HEIGHT, WIDTH, 3), 40, np.uint8)
    for left, top, channel in boxes:
        pixels[top : top + SIZE, left : left + SIZE] = 40
        pixels[top : top + SIZE, left : left + SIZE, channel] = 230
    return pixels


def write_video(path: Path, frames: Iterable[NDArray[np.uint8]]) -> Path:
    with closing(VideoWriter(path, 25)) as writer:
        for number, pixels in enumerate(frames):
            writer.write(pixels, number / 25)
    return path


def crossing(number: int) -> Boxes:
    """Red goes right, green left below it, blue down; blue is away from frame 12 to 17."""
    shapes = [(10 + 6 * number, 20, 0), (200 - 6 * number, 60, 1)]
    return shapes if 12 <= number < 18 else [*shapes, (100, 100 + number, 2)]


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("video") / "a.mp4", (drawn(crossing(number)) for number in range(30)))


def ids_of(results: Iterable[Result]) -> dict[str, list[int | None]]:
    """By colour, which the scores tell: the id in each frame where it is seen."""
    found = defaultdict[str, list[int | None]](list)
    for box in chain.from_iterable(results):
        found[{9: "red", 8: "green", 7: "blue"}[round(box.score * 10)]].append(box.track)
    return found


@needs_trackers
def test_an_object_keeps_its_id_along_its_way(video: Path) -> None:
    results = list(detector()(video, track=True))
    found = ids_of(results)
    assert {colour: ids[0] for colour, ids in found.items()} == dict.fromkeys(("red", "green", "blue"))  # unconfirmed
    later = {colour: set(ids[1:]) for colour, ids in found.items()}
    assert all(len(ids) == 1 for ids in later.values()) and set().union(*later.values()) == {1, 2, 3}
    assert [len(ids) for ids in found.values()] == [30, 30, 24]
    for result, plain in zip(results, detector()(video), strict=True):  # nothing else is changed
        assert result.track_ids is not None and result.track_ids.dtype == np.int64
        np.testing.assert_array_equal(result.boxes_xyxy, plain.boxes_xyxy)
        np.testing.assert_array_equal(result.scores, plain.scores)
        assert plain.track_ids is None and "track" not in plain.to_dict()["detections"][0]
        with pytest.raises(ValueError, match="read-only"):
            result.track_ids[:] = 0


@needs_trackers
def test_frames_that_are_left_out_count_by_their_time(video: Path) -> None:
    found = ids_of(detector()(video, track=True, vid_stride=2))
    assert found == {colour: [None, *[ids[-1]] * (len(ids) - 1)] for colour, ids in found.items()} and len(found) == 3
    tracking = Tracking((0.5, 0.5))
    frames = [*range(10), 16, 17]  # between two of them the object goes further than it is wide
    moving = [ids(tracking(made(number, [[6.0 * number, 10, 6.0 * number + 30, 40]], [0]))) for number in frames]
    assert moving == [[-1]] + [[1]] * 11


@needs_trackers
def test_each_video_has_ids_of_its_own_and_an_image_none(
    video: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = write_video(tmp_path / "b.mp4", (drawn([(20 + 3 * number, 30, 1)]) for number in range(6)))
    Image.fromarray(drawn([(20, 20, 0)])).save(tmp_path / "a.png")
    sources = defaultdict[str, set[int | None]](set)
    for result in detector()([tmp_path / "a.png", video, other, video], track=True):
        sources[result.source] |= {box.track for box in result}
        assert (result.track_ids is None) == result.source.endswith("a.png")
    assert sources == {str(tmp_path / "a.png"): {None}, str(video): {None, 1, 2, 3}, str(other): {None, 1}}
    assert "1 of 4 sources are images" in caplog.text


def made(
    number: int, boxes: list[list[float]], classes: list[int], score: float = 0.9, source: str = "camera"
) -> Result:
    found = (
        np.array(boxes, np.float32).reshape(-1, 4),
        np.full(len(boxes), score, np.float32),
        np.array(classes, np.int64),
    )
    return Result(*found, ("cat", "dog"), source, (100, 100), "stream", number, number / 10)


def ids(result: Result) -> list[int]:
    assert result.track_ids is not None
    return result.track_ids.tolist()


BOX = [10.0, 10.0, 40.0, 40.0]


@needs_trackers
@pytest.mark.parametrize("kind", ["gap", "reconnected"])
def test_a_gap_ends_all_tracks_of_that_stream(kind: str) -> None:
    tracking = Tracking((0.5, 0.5))
    for source in ("camera", "other"):
        assert [ids(tracking(made(n, [BOX], [0], source=source))) for n in range(3)] == [[-1], [1], [1]]
    tracking.event(SourceEvent("camera", kind, "camera: nothing came", "stream"))  # type: ignore[arg-type]
    assert [ids(tracking(made(n, [BOX], [0]))) for n in range(3, 6)] == [[-1], [2], [2]]
    assert ids(tracking(made(3, [BOX], [0], source="other"))) == [1]


@needs_trackers
def test_a_track_ends_a_second_after_its_last_detection() -> None:
    for pause, expected in ((8, 1), (15, 2)):
        tracking = Tracking((0.5, 0.5))
        for number in range(2):
            tracking(made(number, [BOX], [0]))
        for number in range(2, pause):
            assert ids(tracking(made(number, [], []))) == []
        assert [ids(tracking(made(number, [BOX], [0]))) for number in (pause, pause + 1)][-1] == [expected]


@needs_trackers
def test_classes_are_tracked_apart_or_together() -> None:
    apart, together = Tracking((0.5, 0.5)), Tracking((0.5, 0.5), across_classes=True)
    twins = [ids(apart(made(number, [BOX, BOX], [0, 1]))) for number in range(6)]
    assert twins == [[-1, -1]] + [[1, 2]] * 5
    changing = [ids(together(made(number, [BOX], [number % 2]))) for number in range(6)]
    assert changing == [[-1]] + [[1]] * 5


@needs_trackers
def test_weak_detections_continue_tracks_and_begin_none_and_times_may_stand_still() -> None:
    tracking = Tracking((0.5, 0.5))
    assert [ids(tracking(made(number, [BOX], [0], 0.3))) for number in range(3)] == [[-1]] * 3
    assert [ids(tracking(made(number, [BOX], [0], 0.9))) for number in range(3, 6)] == [[-1], [1], [1]]
    far = [60.0, 60.0, 90.0, 90.0]
    assert [ids(tracking(made(number, [far, BOX], [0, 0], 0.3))) for number in range(6, 9)] == [[-1, 1]] * 3
    assert [ids(tracking(made(number, [BOX], [0]))) for number in (9, 9, 7, 8, 10)] == [[1]] * 5


@needs_trackers
def test_every_file_has_the_ids(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "best.pt", ANCHORED)
    write_video(tmp_path / "still.mp4", [made_image(96, 128)] * 4)
    summary = detect.run(
        weights=str(weights), source=str(tmp_path / "still.mp4"), project=str(tmp_path / "runs"), device="cpu",
        track=True, save_txt=True, save_conf=True, save_csv=True, save_json=True,
    )  # fmt: skip
    assert summary.folder is not None and (summary.folder / "still.mp4").stat().st_size > 0
    head, *lines = map(json.loads, (summary.folder / "predictions.jsonl").read_text().splitlines())
    frames = [line for line in lines if "detections" in line]
    assert head["track"] is True and len(frames) == 4
    tracks = [[row["track"] for row in line["detections"]] for line in frames]
    known = [track for row in tracks for track in row if track is not None]
    assert set(tracks[0]) == {None} and min(known) == 1 and len(set(known)) < len(known)
    with (summary.folder / "predictions.csv").open(newline="") as file:
        columns, *rows = csv.reader(file)
    assert columns[-1] == "Track" and columns[0] == "Image Name"
    assert [row[-1] for row in rows] == ["" if track is None else str(track) for row in tracks for track in row]
    for number, row in enumerate(tracks):
        written = (summary.folder / "labels" / f"still_{number}.txt").read_text().splitlines()
        assert [line.split()[6:] for line in written] == [["-1" if track is None else str(track)] for track in row]


def test_images_alone_are_refused(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.fromarray(drawn([])).save(tmp_path / name)
    for source in (tmp_path, tmp_path / "a.png", drawn([]), [drawn([]), drawn([])]):
        with pytest.raises(ConfigError, match="expected a video or a stream"):
            detector()(source, track=True)


def test_without_the_package_the_message_says_what_installs_it(video: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackers", None)
    with pytest.raises(UserError, match=r"--track: needs the package trackers.*uv sync --extra track"):
        detector()(video, track=True)


IMPORTING = """
import logging, os, sys, tempfile, threading, warnings
import matplotlib, numpy
from tessera.deploy.inference.tracking import tracking_packages
tempfile.gettempdir()  # tries whether it can write
refused = {"socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.remove", "os.rename"}
def watch(event, args):
    if event in refused or event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        print("refused:", event, args[0], flush=True)
sys.addaudithook(watch)
state = lambda: (warnings.filters[:], logging.root.handlers[:], logging.root.level, threading.enumerate())
before = state()
assert "trackers" not in sys.modules and "supervision" not in sys.modules
tracking_packages()
assert "trackers" in sys.modules and "supervision" in sys.modules
print("same" if before == state() else ("changed", before, state()))
"""


@pytest.mark.slow
@needs_trackers
def test_importing_the_packages_changes_and_sends_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-B", "-c", IMPORTING], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["same"], done.stdout + done.stderr
