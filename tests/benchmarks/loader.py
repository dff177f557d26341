"""Training samples per second in one process, from memory and from JPEG files.

uv run python -m tests.benchmarks.loader --data coco128.yaml
"""

from __future__ import annotations

import itertools
import math

import cv2
import numpy as np

from tessera.data.feed.cache import open_images
from tessera.data.feed.image_store import ImageStore
from tessera.data.feed.loader import build_train_loader
from tessera.utils.config import Hyp, load_hyp
from tessera.utils.ranks.world import World
from tessera.utils.types import DatasetIndex
from tests.benchmarks.harness import indexed, parser, repeated, rounds, show
from tests.data.made_run import made_run

FILL = 114


class PlainLoader:
    """The plain way to make a sample: four images on a canvas, one warp, HSV by tables, flip, channels first."""

    def __init__(self, load, boxes: list[np.ndarray], hyp: Hyp, imgsz: int) -> None:  # type: ignore[no-untyped-def]
        self.load, self.boxes, self.hyp, self.imgsz = load, boxes, hyp, imgsz
        self.rng = np.random.default_rng(0)

    def __call__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the image (3, S, S) and boxes (n, 5)."""
        size, rng, hyp = self.imgsz, self.rng, self.hyp
        centre_x, centre_y = (int(v) for v in rng.uniform(0.5 * size, 1.5 * size, 2))
        canvas = np.full((2 * size, 2 * size, 3), FILL, np.uint8)
        labels = []
        for corner, number in enumerate([index, *rng.integers(len(self.boxes), size=3).tolist()]):
            image = self.load(number)
            height, width = image.shape[:2]
            left = centre_x - width if corner in (0, 2) else centre_x
            top = centre_y - height if corner in (0, 1) else centre_y
            x0, y0, x1, y1 = max(left, 0), max(top, 0), min(left + width, 2 * size), min(top + height, 2 * size)
            canvas[y0:y1, x0:x1] = image[y0 - top : y1 - top, x0 - left : x1 - left]
            moved = self.boxes[number].copy()
            moved[:, 1:] = (moved[:, 1:] + [left, top, left, top]).clip(0, 2 * size)
            labels.append(moved)
        image, boxes = self._warp(canvas, np.concatenate(labels))
        self._hsv(image)
        if rng.random() < hyp.fliplr:
            image = np.fliplr(image)
            boxes[:, [1, 3]] = size - boxes[:, [3, 1]]
        return np.ascontiguousarray(image.transpose(2, 0, 1)[::-1]), boxes

    def _warp(self, canvas: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size, rng, hyp = self.imgsz, self.rng, self.hyp
        zoom = rng.uniform(1 - hyp.scale, 1 + hyp.scale)
        angle = math.radians(rng.uniform(-hyp.degrees, hyp.degrees))
        shift = rng.uniform(0.5 - hyp.translate, 0.5 + hyp.translate, 2) * size
        cos, sin = zoom * math.cos(angle), zoom * math.sin(angle)
        matrix = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
        matrix = np.array([[1, 0, shift[0]], [0, 1, shift[1]], [0, 0, 1]]) @ matrix
        matrix = matrix @ np.array([[1, 0, -size], [0, 1, -size], [0, 0, 1]])
        image = cv2.warpAffine(canvas, matrix[:2], (size, size), borderValue=(FILL, FILL, FILL))
        corners = np.ones((4 * len(boxes), 3))
        corners[:, :2] = boxes[:, [1, 2, 3, 4, 1, 4, 3, 2]].reshape(-1, 2)
        mapped = (corners @ matrix.T)[:, :2].reshape(-1, 4, 2)
        after = np.concatenate([mapped.min(1), mapped.max(1)], 1).clip(0, size)
        sides, before = after[:, 2:] - after[:, :2], (boxes[:, 3:] - boxes[:, 1:3]) * zoom
        kept = (sides > 2).all(1) & (sides.prod(1) > 0.1 * before.prod(1))
        return image, np.concatenate([boxes[kept, :1], after[kept]], 1)

    def _hsv(self, image: np.ndarray) -> None:
        gains = self.rng.uniform(-1, 1, 3) * [self.hyp.hsv_h, self.hyp.hsv_s, self.hyp.hsv_v] + 1
        values = np.arange(256)
        tables = [(values * gains[0]) % 180, *((values * gain).clip(0, 255) for gain in gains[1:])]
        planes = cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV))
        merged = cv2.merge([cv2.LUT(p, t.astype(np.uint8)) for p, t in zip(planes, tables, strict=True)])
        cv2.cvtColor(merged, cv2.COLOR_HSV2BGR, dst=image)


def plain_rivals(index: DatasetIndex, imgsz: int, hyp_name: str):  # type: ignore[no-untyped-def]

    def read(number: int) -> np.ndarray:
        image = cv2.imread(str(index.path(number)))
        assert image is not None
        ratio = imgsz / max(image.shape[:2])
        return cv2.resize(image, None, fx=ratio, fy=ratio, interpolation=cv2.INTER_LINEAR)

    boxes = []
    for number in range(len(index)):
        classes, xyxy = index.labels(number)
        scale = imgsz / index.sizes_hw[number].max()
        boxes.append(np.concatenate([classes[:, None], xyxy * scale], 1).astype(float))
    kept = {str(index.path(number)): read(number) for number in range(len(index))}
    hyp = load_hyp(hyp_name)
    return PlainLoader(lambda number: kept[str(index.path(number))], boxes, hyp, imgsz), PlainLoader(
        read, boxes, hyp, imgsz
    )


def main() -> None:
    given = parser(
        __doc__,
        data="shapes.yaml",
        rounds=7,
        imgsz=640,
        images=(128, "samples a round"),
        times=(16, "repetitions of the dataset"),
        hyp="hyp.scratch-low.yaml",
    ).parse_args()
    index = repeated(indexed(given.data), given.times)
    from_memory, from_files = plain_rivals(index, given.imgsz, given.hyp)

    def plain(loader: PlainLoader):  # type: ignore[no-untyped-def]
        def epoch() -> int:
            batch = np.empty((16, 3, given.imgsz, given.imgsz), np.uint8)
            for number in range(given.images):
                batch[number % 16] = loader(number % len(index))[0]
            return given.images

        return epoch

    def ours(store: ImageStore):  # type: ignore[no-untyped-def]
        run = made_run(load_hyp(given.hyp), imgsz=given.imgsz, batch_size=16, epochs=10**6, workers=0)
        loader = build_train_loader(run, store)
        stream = itertools.chain.from_iterable(map(loader.batches, itertools.count()))

        def some() -> int:
            return sum(len(batch) for batch in itertools.islice(stream, given.images // 16))

        return some

    with open_images(index, given.imgsz, "ram", "linear", World()) as cached:
        rates = rounds({"plain, from memory": plain(from_memory), "Tessera, --cache ram": ours(cached)}, given.rounds)
    show(rates, "plain, from memory")
    store = ImageStore(index, given.imgsz, "linear")
    rates = rounds({"plain, from files": plain(from_files), "Tessera, from files": ours(store)}, given.rounds)
    show(rates, "plain, from files")


if __name__ == "__main__":
    main()
