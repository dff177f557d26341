"""Tests of written videos: rate, times and colours of the source."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tessera.deploy.inference.video_writer import VideoWriter
from tessera.utils.errors import UserError
from tests.deploy.inference.sources.made_sources import barcode, events, frames, items, number_of


def test_rate_number_and_colours_are_kept(tmp_path: Path) -> None:
    with closing(VideoWriter(tmp_path / "a.mp4", 29.97)) as writer:
        for number in range(90):
            pixels = barcode(number)
            pixels[:4] = (255, 0, 0)
            writer.write(pixels, round(number / 29.97, 3))
        assert not (tmp_path / "a.mp4").exists(), "only whole files bear the name"
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    got = frames(items(tmp_path / "a.mp4"))
    assert [number_of(frame.pixels) for frame in got] == list(range(90))
    facts = events(items(tmp_path / "a.mp4"))[0].facts
    assert facts is not None and facts.fps == pytest.approx(29.97, rel=1e-3)
    red, green, blue = got[0].pixels[:2].mean(axis=(0, 1))
    assert red > 150 > 100 > max(green, blue)


def test_a_variable_rate_keeps_its_times(tmp_path: Path) -> None:
    times = [0.0, 0.1, 0.2, 1.2, 1.3]
    with closing(VideoWriter(tmp_path / "a.mp4", 10)) as writer:
        for number, time_s in enumerate(times):
            writer.write(barcode(number), 5.0 + time_s)
        writer.write(barcode(99), 6.31)  # no place left for it
    shown = [number_of(frame.pixels) for frame in frames(items(tmp_path / "a.mp4"))]
    assert shown == [0, 1, *[2] * 10, 3, 4]


def test_a_gap_of_an_hour_is_shortened(tmp_path: Path) -> None:
    with closing(VideoWriter(tmp_path / "a.mp4", 5)) as writer:
        for number, time_s in enumerate([0.0, 3600.0, 3600.2]):
            writer.write(barcode(number), time_s)
    shown = [number_of(frame.pixels) for frame in frames(items(tmp_path / "a.mp4"))]
    assert shown == [*[0] * 51, 1, 2]


def test_frames_of_another_size_keep_their_proportions_and_odd_sides_lose_a_pixel(tmp_path: Path) -> None:
    with closing(VideoWriter(tmp_path / "a.mp4", None)) as writer:
        writer.write(np.zeros((31, 41, 3), np.uint8))
        writer.write(np.full((90, 30, 3), 255, np.uint8))
    bright = frames(items(tmp_path / "a.mp4"))[1].pixels.mean(axis=2) > 127
    assert bright.all(axis=0).sum() == pytest.approx(10, abs=2) == bright.any(axis=0).sum()
    assert [frame.pixels.shape[:2] for frame in frames(items(tmp_path / "a.mp4"))] == [(30, 40)] * 2


def test_a_folder_that_cannot_be_written_to_and_no_frame(tmp_path: Path) -> None:
    VideoWriter(tmp_path / "a.mp4", 10).close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"gone.*cannot be written"):
        VideoWriter(tmp_path / "gone" / "a.mp4", 10).write(barcode(1))
