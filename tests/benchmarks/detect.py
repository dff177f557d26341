"""Latency of a Detector per image, and its fraction outside the network.

uv run python -m tests.benchmarks.detect [--weights yolov5n.pt] [--source images/] [--imgsz 640]

Without --source the images are drawn, 480 x 640 pixels. Milliseconds are medians over the images, each predicted three
times after a first round; seconds of CPU are printed too, for a machine that does other work as well.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from tessera.deploy.foreign.synthetic_shapes import write_shapes
from tessera.deploy.inference.detector import Detector
from tessera.utils.bit_depth import IMAGE_SUFFIXES
from tests.benchmarks.harness import machine, parser

ROUNDS = 3
STAGES = ("reading", "preprocessing", "inference", "NMS")


def latency(detector: Detector, paths: list[Path]) -> None:
    rows, cpu_s, wall_s = [], 0.0, 0.0
    for number in range(1 + ROUNDS):
        for path in paths:
            wall, cpu = time.perf_counter(), time.process_time()
            (result,) = detector(path)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if number:
                rows.append((1000 * wall - sum(result.speed_ms), *result.speed_ms))
                cpu_s, wall_s = cpu_s + cpu, wall_s + wall
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    print("  " + ", ".join(f"{stage} {ms:.2f} ms" for stage, ms in zip(STAGES, medians, strict=True)))
    reading, preprocessing, inference, nms = medians
    pipeline = preprocessing + inference + nms
    print(f"  an image in memory {pipeline:.1f} ms, {1 - inference / pipeline:.1%} of it outside the network")
    print(f"  an image in a file {reading + pipeline:.1f} ms, {1 - inference / (reading + pipeline):.1%} outside")
    print(f"  {1000 * wall_s / len(rows):.1f} ms of wall clock and {1000 * cpu_s / len(rows):.1f} ms of CPU an image")


def main() -> None:
    args = parser(__doc__, weights="yolov5n.pt", source="", imgsz=640, device="cpu", images=32).parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        source = Path(args.source)
        if not args.source:
            write_shapes(Path(folder) / "shapes", train=args.images, val=1, size=640)
            source = Path(folder) / "shapes" / "images" / "train"
        paths = [path for path in sorted(source.iterdir()) if path.suffix.lower() in IMAGE_SUFFIXES][: args.images]
        detector = Detector(args.weights, imgsz=args.imgsz, device=args.device)
        print(f"{args.weights} at {args.imgsz} px, {len(paths)} images, {detector.rules.conf:g} confidence")
        latency(detector, paths)


if __name__ == "__main__":
    main()
