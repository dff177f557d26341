"""Frames a second of a video: read by OpenCV alone, by the sources, detected, both; and memory over 5,000 frames.

uv run python -m tests.benchmarks.video --weights yolov5n.pt

"By OpenCV" reads and turns to RGB in a plain loop. The video is drawn shapes on noise, 1280 x 720, 30 frames a second.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import cv2
import numpy as np

from tessera.utils.inference.detector import Detector
from tessera.utils.inference.pictures import to_pixels
from tessera.utils.inference.sources.frames import Frame
from tessera.utils.inference.sources.sources import open_sources
from tests.benchmarks.memory import MIB, pss
from tests.benchmarks.rounds import rounds, show

SIZE_WH, FPS = (1280, 720), 30.0


def write_video(path: Path, frames: int) -> None:
    """Boxes and discs that move over noise."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), FPS, SIZE_WH)
    assert writer.isOpened()
    width, height = SIZE_WH
    ground = np.random.default_rng(0).integers(60, 180, (height // 8, width // 8, 3), np.uint8)
    ground = cv2.resize(ground, SIZE_WH, interpolation=cv2.INTER_CUBIC)
    for number in range(frames):
        picture = ground.copy()
        for object_number in range(12):
            x = (object_number * 211 + 7 * number) % width
            y = (object_number * 97 + 3 * number) % height
            colour = tuple(int(255 * bit) for bit in (object_number & 1, object_number & 2, object_number & 4))
            if object_number % 2:
                cv2.rectangle(picture, (x, y), (x + 90, y + 60), colour, -1)
            else:
                cv2.circle(picture, (x, y), 40, colour, -1)
        writer.write(picture)
    writer.release()


def by_opencv(path: Path) -> int:
    """Plain reading."""
    capture, count = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG), 0
    while True:
        found, pixels = capture.read()
        if not found:
            return count
        cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels)
        count += 1


def frames_of(path: Path) -> list[Frame]:
    """All frames, kept."""
    with open_sources(path, read=to_pixels) as sources:
        return [item for item in sources if isinstance(item, Frame)]


def by_sources(path: Path) -> int:
    """As detect.py reads."""
    with open_sources(path, read=to_pixels) as sources:
        return sum(isinstance(item, Frame) for item in sources)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--weights", default="yolov5n.pt")
    flags.add_argument("--frames", type=int, default=120)
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--long", type=int, default=5000, help="frames that memory is watched over; 0 = none")
    args = flags.parse_args()
    detector = Detector(args.weights)
    with tempfile.TemporaryDirectory() as folder:
        video = Path(folder) / "video.mp4"
        write_video(video, args.frames)
        kept = frames_of(video)
        rivals = {
            "read by OpenCV": lambda: by_opencv(video),
            "read by the sources": lambda: by_sources(video),
            "detected, read before": lambda: sum(detector.detect(frame) is not None for frame in kept),
            "read and detected": lambda: sum(1 for _ in detector(video)),
        }
        show(rounds(rivals, args.rounds), "detected, read before", "frames/s")
        kept.clear()
        if args.long:
            write_video(video, args.long)
            marks = {}
            for number, _ in enumerate(detector(video), start=1):
                if number in (args.long // 10, args.long // 2, args.long):
                    marks[number] = pss([os.getpid()]) / MIB
            print("  memory after " + ", ".join(f"{n:,} frames {mib:.0f} MiB" for n, mib in marks.items()))


if __name__ == "__main__":
    main()
