"""Time of an image in each exported file, from decoded pixels to boxes: float32, 16 and 8 bits, in both runtimes.

uv run python -m tests.benchmarks.exports --weights yolov5n.pt --data coco128.yaml --accuracy
uv run python -m tests.benchmarks.exports --weights yolov5n.pt --data coco128.yaml --folder files

Files in `--folder` are reused: the second call measures times alone, while the machine is idle.
The baseline is a bare network with a letterbox by OpenCV and NMS by NumPy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
import torch

from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.exporting.formats import Format, chosen
from tessera.deploy.exporting.job import ExportJob
from tessera.deploy.exporting.verify import Verifier, sample_images, table
from tessera.deploy.runtime.pipeline import image_detector, nms_settings
from tessera.deploy.runtime.runtimes import open_exported
from tessera.utils.evaluation.evaluate import Settings
from tessera.utils.evaluation.network import ImageDetector, Network, open_model
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tests.benchmarks.harness import indexed, parser, rounds, show

CONF, IOU, MAX_DET = 0.25, 0.45, 300
Images = Sequence[np.ndarray]


def plain_letterbox(image: np.ndarray, size: int) -> tuple[np.ndarray, float, int, int]:
    """A square of float32 (1, 3, size, size), with the scale, left and top of the image in it."""
    height, width = image.shape[:2]
    scale = size / max(height, width)
    new_w, new_h = round(width * scale), round(height * scale)
    left, top = (size - new_w) // 2, (size - new_h) // 2
    canvas = np.full((size, size, 3), 114, np.uint8)
    canvas[top : top + new_h, left : left + new_w] = cv2.resize(image, (new_w, new_h))
    return np.ascontiguousarray(canvas.transpose(2, 0, 1)[None], np.float32) / 255, scale, left, top


def plain_nms(rows: np.ndarray) -> np.ndarray:
    """Rows x1, y1, x2, y2, score, class of (A, 4 + C), class by class."""
    index, classes = np.nonzero(rows[:, 4:] > CONF)
    scores = rows[index, 4 + classes]
    order = np.argsort(-scores)
    index, classes, scores = index[order], classes[order], scores[order]
    middle, half = rows[index, :2], rows[index, 2:4] / 2
    boxes = np.concatenate((middle - half, middle + half), 1)
    apart = boxes + classes[:, None] * 10_000.0
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    left, kept = np.arange(len(boxes)), []
    while len(left) and len(kept) < MAX_DET:
        best, others = left[0], left[1:]
        kept.append(best)
        low, high = np.maximum(apart[best, :2], apart[others, :2]), np.minimum(apart[best, 2:], apart[others, 2:])
        common = np.clip(high - low, 0, None).prod(1)
        left = others[common / (area[best] + area[others] - common) <= IOU]
    return np.concatenate((boxes, scores[:, None], classes[:, None]), 1)[kept]


def plain(network: Network, images: Images, size: int) -> Callable[[], int]:

    def run() -> int:
        for image in images:
            canvas, scale, left, top = plain_letterbox(image, size)
            found = plain_nms(network(torch.from_numpy(canvas))[0].numpy())
            found[:, :4] = (found[:, :4] - [left, top, left, top]) / scale
        return len(images)

    return run


def ours(network: Network | ImageDetector, images: Images, size: int) -> Callable[[], int]:
    """Return a run of a file, or of the checkpoint's network, as detect.py does it."""
    detect, rules = image_detector(network, size), nms_settings(network, conf=CONF, iou=IOU, max_det=MAX_DET)

    def run() -> int:
        for image in images:
            detect(image, rules)
        return len(images)

    return run


def main() -> None:
    given = parser(
        __doc__,
        data="coco128.yaml",
        rounds=7,
        weights="yolov5n.pt",
        imgsz=640,
        folder=("", "keeps the files; those that are there are not written again"),
        accuracy=(False, "also size and mAP50-95 of each file, and what it loses of the checkpoint's"),
    ).parse_args()
    cpu = Accelerator()
    world, index = World(accelerator=cpu), indexed(given.data, "val")
    images, _ = sample_images(index, given.imgsz)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(given.folder or scratch)
        folder.mkdir(parents=True, exist_ok=True)

        def job(**variant: bool) -> ExportJob:
            flags = {"weights": given.weights, "imgsz": [given.imgsz], "data": given.data, "output": str(folder)}
            return ExportJob.read(ExportConfig(**flags, **variant))

        def written(kind: Format, **variant: bool) -> Path:
            one = job(**variant)
            path = one.file(kind.suffix)
            return path if path.exists() else kind.export(one)

        onnx, xml = chosen(["onnx", "openvino"])
        raw = open_exported(written(onnx, raw=True), cpu)
        assert isinstance(raw, Network)
        files = {
            "ONNX Runtime, float32": written(onnx),
            "ONNX Runtime, float16": written(onnx, half=True),
            "ONNX Runtime, int8": written(onnx, int8=True),
            "OpenVINO, float32": written(xml),
            "OpenVINO, int8": written(xml, int8=True),
        }
        networks = {
            "checkpoint, torch, float32": open_model(given.weights, world),
            **{name: open_exported(path, cpu) for name, path in files.items()},
        }
        rivals = {name: ours(network, images, given.imgsz) for name, network in networks.items()}
        baseline = "bare network, NumPy around it"
        rates = rounds({baseline: plain(raw, images, given.imgsz), **rivals}, given.rounds)
        show(rates, baseline, unit="images/s")
        if given.accuracy:
            judge = Verifier(job(), images, world, index, Settings())
            print("\n".join(table([judge.network(), *map(judge.file, files.values())])))


if __name__ == "__main__":
    main()
