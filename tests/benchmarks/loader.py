"""Training samples a second, one process: from images in memory, and from JPEG files; and decodes with more workers.

uv run python -m tests.benchmarks.loader --data coco128.yaml
"""

from __future__ import annotations

import itertools
from unittest import mock

import cv2
import numpy as np

from tessera.data.feed.cache import open_images
from tessera.data.feed.images import ImageStore
from tessera.data.feed.loader import build_train_loader
from tessera.utils.config import load_hyp
from tessera.utils.ranks import world as world_module
from tessera.utils.ranks.world import World
from tessera.utils.types import DatasetIndex
from tests.benchmarks.plain import PlainLoader
from tests.benchmarks.rounds import indexed, parser, repeated, rounds, show
from tests.data.counted import CountedStore
from tests.data.made_run import made_run

# Of the original trainer on the machine where the plain way takes 1.55 + 1.18 + 0.3 ms: 293 images/s from its cache.
ORIGINAL_OVER_PLAIN_MS = 1000 / 293 - (1.55 + 1.18 + 0.3)


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


def decodes_a_sample(index: DatasetIndex, imgsz: int, hyp: str, workers: int) -> float:
    """Images decoded over samples of two epochs, with `workers` whatever the processors."""
    run = made_run(load_hyp(hyp), imgsz=imgsz, batch_size=16, epochs=2, workers=workers)
    store = CountedStore(index, imgsz, "linear")
    with (
        mock.patch.object(world_module, "share_of_cpus", lambda *_: workers),
        build_train_loader(run, store) as batches,
    ):
        samples = sum(len(batch) for epoch in range(2) for batch in batches.batches(epoch))
    return store.decoded / samples


def main() -> None:
    given = parser(
        __doc__,
        data="shapes.yaml",
        rounds=7,
        imgsz=640,
        images=(128, "samples a round"),
        times=(16, "the dataset so many times over, more than is held"),
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
    original = 1000 / (1000 / rates["plain, from memory"] * (1000 / 293) / (1.55 + 1.18 + 0.3))
    print(f"  of the original, scaled by the plain way: {rates['Tessera, --cache ram'] / original:.2f} x")

    store = ImageStore(index, given.imgsz, "linear")
    rates = rounds({"plain, from files": plain(from_files), "Tessera, from files": ours(store)}, given.rounds)
    show(rates, "plain, from files")
    original = 1000 / (1000 / rates["plain, from files"] + ORIGINAL_OVER_PLAIN_MS)
    print(f"  of the original, scaled by the plain way: {rates['Tessera, from files'] / original:.2f} x")
    small = indexed(given.data)
    for workers in (1, 2, 4, 8):
        many, few = (decodes_a_sample(of, given.imgsz, given.hyp, workers) for of in (index, small))
        print(
            f"  decoded a sample in two epochs with {workers} workers: {many:.2f} images of {len(index)}, "
            f"{few:.2f} of {len(small)}"
        )


if __name__ == "__main__":
    main()
