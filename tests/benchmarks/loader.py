"""Training samples a second, one process: from images in memory, and from JPEG files.

uv run python -m tests.benchmarks.loader --data coco128.yaml
"""

from __future__ import annotations

import itertools

import cv2
import numpy as np

from data.images import ImageStore, open_images
from data.loader import build_train_loader
from tests.benchmarks.plain import PlainLoader
from tests.benchmarks.rounds import indexed, parser, repeated, rounds, show
from utils.config import load_hyp
from utils.distributed import World
from utils.structures import DatasetIndex

# Of the original trainer on the machine where the plain way takes 1.55 + 1.18 + 0.3 ms: 293 images/s from its cache.
ORIGINAL_OVER_PLAIN_MS = 1000 / 293 - (1.55 + 1.18 + 0.3)


def plain_rivals(index: DatasetIndex, imgsz: int, hyp_name: str):  # type: ignore[no-untyped-def]
    """The plain loader, from memory and from files."""

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
    flags = parser(__doc__)
    flags.add_argument("--imgsz", type=int, default=640)
    flags.add_argument("--images", type=int, default=128, help="samples a round")
    flags.add_argument("--times", type=int, default=8, help="the dataset so many times over, more than a loader keeps")
    flags.add_argument("--hyp", default="hyp.scratch-low.yaml")
    given = flags.parse_args()
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
        loader = build_train_loader(
            index,
            store,
            hyp=load_hyp(given.hyp),
            imgsz=given.imgsz,
            batch_size=16,
            seed=0,
            epochs=10**6,
            world=World(),
            workers=0,
        )
        stream = itertools.chain.from_iterable(map(loader.batches, itertools.count()))

        def some() -> int:
            return sum(len(batch) for batch in itertools.islice(stream, given.images // 16))

        return some

    with open_images(index, given.imgsz, "ram", "linear", World()) as cached:
        rates = rounds({"plain, from memory": plain(from_memory), "Tessera, --cache ram": ours(cached)}, given.rounds)
    show(rates, "plain, from memory")
    original = 1000 / (1000 / rates["plain, from memory"] * (1000 / 293) / (1.55 + 1.18 + 0.3))
    print(f"  of the original, scaled by the plain way: {rates['Tessera, --cache ram'] / original:.2f} x")

    store = ImageStore(index, given.imgsz, "linear")
    rates = rounds({"plain, from files": plain(from_files), "Tessera, from files": ours(store)}, given.rounds)
    show(rates, "plain, from files")
    original = 1000 / (1000 / rates["plain, from files"] + ORIGINAL_OVER_PLAIN_MS)
    print(f"  of the original, scaled by the plain way: {rates['Tessera, from files'] / original:.2f} x")


if __name__ == "__main__":
    main()
