"""detect.py on a folder, a video and four streams, results written, beside the network alone on the same pictures.

uv run python -m tests.benchmarks.sources --weights yolov5n.pt --source pictures/

By turns, in one process. The video, 1280 x 720 pixels, is made of the pictures; the streams are Motion JPEG of its
frames from a process of their own, 25 frames a second each, of which the newest are taken. Milliseconds are those of
the clock and, behind them, of the processor: decoding, drawing, encoding and writing take theirs from the same cores.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path, PurePath
from unittest.mock import patch

import cv2
import numpy as np
import torch

from tessera.commands import detect
from tessera.data.source.decode import read_image
from tessera.utils.errors import Interrupted
from tessera.utils.inference.detector import Detector
from tessera.utils.inference.outputs import PictureFiles
from tessera.utils.inference.results import Result
from tessera.utils.inference.sources.frames import Frame
from tessera.utils.inference.tally import Tally
from tessera.utils.inference.video_writer import VideoWriter
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.pixels import IMAGE_SUFFIXES, Pixels
from tessera.utils.runtime.pipeline import fit_picture, network_input
from tests.benchmarks.gathering import status_kb
from tests.benchmarks.rounds import machine, parser
from tests.raw_server import serving
from tests.utils.inference.sources.mjpeg_server import MjpegServer

STREAMS, FPS, SIZE_WH = 4, 25, (1280, 720)
Times = tuple[float, float]  # seconds a picture, of the clock and of the processor
Rival = Callable[[], Times]


class Clock:
    """What detect.py took, from the first source on until all is written; and how late each stream's frames were."""

    def __init__(self) -> None:
        self.times: Times = (0.0, 0.0)
        self.delays: dict[str, list[float]] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, detect.py is measured."""
        clock = self

        class Timed(Tally):
            def __init__(self, names: tuple[str, ...]) -> None:
                super().__init__(names)
                self._begun = time.perf_counter(), time.process_time()

            def note(self, *others: object) -> None:
                wall, cpu = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]
                clock.times = wall / self.pictures, cpu / self.pictures

        class Noted(PictureFiles):
            def add(self, result: Result, frame: Frame, place: PurePath) -> None:
                super().add(result, frame, place)
                if frame.wall_s is not None:
                    clock.delays.setdefault(frame.source, []).append(time.time() - frame.wall_s)

        changed = {"Tally": Timed, "PictureFiles": Noted, "conclude": Timed.note, "setup_logging": lambda *given: None}
        with patch.multiple(detect, **changed):
            yield


def command(weights: str, source: list[str], seconds: float = 0) -> Callable[[], tuple[Times, Clock]]:
    """detect.py as it is called, into a folder that is removed; after some seconds by Ctrl-C, where they are given."""

    def run() -> tuple[Times, Clock]:
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder, clock.reading():
            stop = threading.Timer(seconds, signal.raise_signal, [signal.SIGINT])
            if seconds:
                stop.start()
            try:
                detect.run(weights=weights, source=source, device="cpu", project=folder)
            except (Interrupted, KeyboardInterrupt):
                assert seconds
            stop.cancel()
        return clock.times, clock

    return run


def network_alone(weights: str, pictures: list[Pixels], several: bool) -> Rival:
    """The bare network on pictures that are decoded, resized and turned to tensors before; as many at once."""
    detector = Detector(weights, device="cpu")
    backend = detector.pipeline.backend
    at_once = backend.compute_apart() if several else 1
    images = [
        network_input(fit_picture(picture, detector.imgsz, backend.stride)[0], torch.device("cpu"))
        for picture in pictures
    ]

    def compute(image: torch.Tensor) -> None:
        with torch.no_grad():
            backend(image)

    def run() -> Times:
        wall, cpu = time.perf_counter(), time.process_time()
        if at_once == 1:
            for image in images:
                compute(image)
        else:
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(compute, images))
        return (time.perf_counter() - wall) / len(images), (time.process_time() - cpu) / len(images)

    return run


def panned(paths: list[Path], count: int) -> Iterator[Pixels]:
    """Frames that move over the pictures, 30 of each."""
    width, height = SIZE_WH
    for path in cycle(paths):
        whole = cv2.resize(read_image(path), (width + 160, height + 90))
        for step in range(min(30, count)):
            yield np.ascontiguousarray(whole[3 * step : 3 * step + height, 5 * step : 5 * step + width])


class Camera(MjpegServer):
    """The same frames over and over."""

    def __init__(self, parts: list[bytes]) -> None:
        super().__init__([[1 << 40]] * 100, 1 / FPS)
        self._parts = cycle(parts)

    def next_frame(self) -> bytes:
        """As MjpegServer."""
        body = next(self._parts)
        return b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n" % (len(body), body)


def serve(paths: list[Path], pipe: Connection) -> None:
    """Four cameras, until the other side says so."""
    parts = [cv2.imencode(".jpg", frame[..., ::-1])[1].tobytes() for frame in islice(panned(paths, 30), 90)]
    with ExitStack() as stack:
        cameras = [stack.enter_context(Camera(parts[20 * number :] + parts)) for number in range(STREAMS)]
        for camera in cameras:
            stack.enter_context(serving(camera, camera.over))
        pipe.send([camera.url for camera in cameras])
        pipe.recv()


def show(name: str, rows: list[Times], alone: list[Times]) -> None:
    """A line: medians, fastest and slowest, and ratios to the network alone."""
    wall, cpu = (1000 * statistics.median(column) for column in zip(*rows, strict=True))
    bare_wall, bare_cpu = (1000 * statistics.median(column) for column in zip(*alone, strict=True))
    low, high = (1000 * pick(row[0] for row in rows) for pick in (min, max))
    ratios = "" if rows is alone else f"   {wall / bare_wall:.2f} x, processor {cpu / bare_cpu:.2f} x"
    print(f"  {name:<28}{wall:7.2f} ms ({low:.2f} to {high:.2f}), processor {cpu:6.2f} ms{ratios}", flush=True)


def show_streams(clocks: list[Clock]) -> None:
    """Frames a second and delay of each stream, of the rounds together."""
    for number in range(STREAMS):
        delays = [list(clock.delays.values())[number] for clock in clocks if len(clock.delays) == STREAMS]
        late = sorted(1000 * delay for one in delays for delay in one)
        print(
            f"    stream {number + 1}: {statistics.median(map(len, delays)):.0f} frames a round, "
            f"{statistics.median(late):.0f} ms after they came, the latest twentieth {late[int(0.95 * len(late))]:.0f}"
        )


def main() -> None:
    """Print the table."""
    args = parser(
        __doc__,
        weights="yolov5n.pt",
        source="",
        frames=300,
        seconds=(12.0, "of the streams, the start of detect.py among them"),
        only=(["folder", "video", "streams"], "of these sources"),
        rounds=3,
    ).parse_args()
    Accelerator().activate()
    paths = [path for path in sorted(Path(args.source).iterdir()) if path.suffix.lower() in IMAGE_SUFFIXES]
    folder_pictures, frames = [read_image(path) for path in paths], list(islice(panned(paths, 30), 60))
    here, there = multiprocessing.get_context("spawn").Pipe()
    cameras = multiprocessing.get_context("spawn").Process(target=serve, args=(paths, there), daemon=True)
    cameras.start()
    urls = here.recv()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        video = Path(folder) / "street.mp4"
        with VideoWriter(video, FPS) as writer:
            for frame in islice(panned(paths, 30), args.frames):
                writer.write(frame)
        sources = {
            "folder": (folder_pictures, command(args.weights, [args.source])),
            "video": (frames, command(args.weights, [str(video)])),
            "streams": (frames, command(args.weights, urls, args.seconds)),
        }
        rivals = {
            name: (network_alone(args.weights, pictures, name != "streams"), run)
            for name, (pictures, run) in sources.items()
            if name in args.only
        }
        alone, found, clocks = ({name: [] for name in rivals} for _ in range(3))  # type: ignore[var-annotated]
        for count in range(1 + args.rounds):
            for name, (bare, run) in rivals.items():
                bare_times, (times, clock) = bare(), run()
                if count:  # after one for caches, allocators, kernels
                    alone[name].append(bare_times)
                    found[name].append(times)
                    clocks[name].append(clock)
        print(f"{args.weights}, {status_kb('VmHWM') / 1024:.0f} MiB at most so far")
        for name in rivals:
            show(f"{name}, network alone", alone[name], alone[name])
            show(f"{name}, detect.py", found[name], alone[name])
        if "streams" in rivals:
            show_streams(clocks["streams"])
    here.send(True)
    cameras.join()


if __name__ == "__main__":
    assert os.environ.get("GOMP_SPINCOUNT"), "set GOMP_SPINCOUNT=1000, as the commands do before torch is loaded"
    main()
