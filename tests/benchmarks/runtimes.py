"""A checkpoint in torch, ONNX Runtime and OpenVINO: val.py on a dataset, and detect.py on its files.

uv run python -m tests.benchmarks.runtimes --weights yolov5n.pt best.pt --data coco128.yaml

By turns, in one process; beside the speeds the mAP of each, which is the same to 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable

from tessera.utils.evaluation.evaluate import measure
from tessera.utils.evaluation.measurement import Settings
from tessera.utils.exporting.fastest import Use, in_runtime
from tessera.utils.flags.options import RUNTIMES
from tessera.utils.inference.ahead import found_ahead, read_ahead
from tessera.utils.inference.detector import Detector
from tessera.utils.inference.sources.frames import Frame
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tessera.utils.runtime.open_model import OpenModel, open_model
from tessera.utils.types import DatasetIndex
from tests.benchmarks.rounds import indexed, parser, rounds, show


def validation(network: OpenModel, index: DatasetIndex, imgsz: int, batch: int) -> Callable[[], int]:
    """val.py's measurement of all images, files and metrics included."""

    def run() -> int:
        measure(network, index, World(), imgsz, Settings(), batch_size=batch, workers=0)
        return len(index)

    return run


def detection(network: OpenModel, index: DatasetIndex, imgsz: int) -> Callable[[], int]:
    """What detect.py does with a folder, without writing: files are read ahead, several are looked at at once."""
    detector = Detector(network, imgsz=imgsz)
    paths = [index.path(image) for image in range(len(index))]

    def run() -> int:
        frames = (Frame(detector.read(path), str(path)) for path in paths)
        with read_ahead(frames) as ahead, found_ahead(ahead, detector.detect, network.compute_apart()) as found:
            return sum(1 for _ in found)

    return run


def main() -> None:
    """Print the table of each model."""
    given = parser(__doc__, data="coco128.yaml", weights=["yolov5n.pt"], imgsz=640, batch=32, rounds=5).parse_args()
    world = World(accelerator=Accelerator())
    world.accelerator.activate()  # as the commands do
    index = indexed(given.data, "val")
    for weights in given.weights:
        rivals = {}
        for runtime in RUNTIMES[1:]:
            network = in_runtime(open_model(weights, world), runtime, weights, world, Use(given.imgsz, len(index)))
            found = measure(network, index, world, given.imgsz, Settings(), batch_size=given.batch, workers=0)
            print(f"{weights}, {runtime}: mAP50-95 {found.metrics.map:.6f}", flush=True)
            rivals[f"{runtime}, val.py"] = validation(network, index, given.imgsz, given.batch)
            rivals[f"{runtime}, detect.py"] = detection(network, index, given.imgsz)
        show(rounds(rivals, given.rounds), "torch, val.py", unit="pictures/s")


if __name__ == "__main__":
    main()
