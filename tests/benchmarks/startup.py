"""First scan of a large dataset.

    uv run python -m tests.benchmarks.startup --data coco128.yaml --images 118287

Images and labels of the dataset are hard-linked under new names until there are `--images` of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from tessera.data.labels.label_files import label_path
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.utils.types import DatasetIndex
from tests.benchmarks.harness import indexed, machine, parser


@contextmanager
def many(index: DatasetIndex, count: int) -> Iterator[Path]:
    """A dataset of `count` hard links; yields its YAML."""
    folder = Path(tempfile.mkdtemp(prefix="tessera-many-"))
    os.environ["TESSERA_CACHE"] = str(folder / "cache")
    try:
        images, labels = folder / "images" / "train", folder / "labels" / "train"
        images.mkdir(parents=True), labels.mkdir(parents=True)
        own: dict[Path, Path] = {}
        for number in range(count):
            image = index.path(number % len(index))
            for source, target in ((image, images), (Path(label_path(str(image))), labels)):
                if source.is_file():
                    link(source, target / f"{number:06d}{source.suffix}", own, folder)
        path = folder / "many.yaml"
        path.write_text(
            yaml.safe_dump(
                {"path": str(folder), "train": "images/train", "val": "images/train", "names": list(index.names)}
            )
        )
        yield path
    finally:
        shutil.rmtree(folder)


def link(source: Path, target: Path, own: dict[Path, Path], folder: Path) -> None:
    """Hard-link, from a copy where the source lies on another file system."""
    if source not in own:
        own[source] = Path(shutil.copy(source, folder / source.name))
    os.link(own[source], target)


def plain_scan(index: DatasetIndex, numbers: range) -> None:
    """Open and verify every image, parse its label line by line; eight threads."""

    def one(number: int) -> int:
        path = index.path(number)
        image = Image.open(path)
        image.verify()
        assert min(image.size) > 9
        label = Path(label_path(str(path)))
        rows = np.zeros((0, 5), np.float32)
        if label.is_file():
            rows = np.array([line.split() for line in label.read_text().splitlines() if line], np.float32)
            rows = rows.reshape(-1, 5)
            assert (rows >= 0).all() and (rows[:, 1:] <= 1).all()
            rows = np.unique(rows, axis=0)
        return len(rows)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, numbers))


def main() -> None:
    given = parser(__doc__, data="shapes.yaml", images=20_000).parse_args()
    print(machine())
    small = indexed(given.data)
    with many(small, given.images) as path:
        started = time.perf_counter()
        index = build_index(load_spec(str(path)), "train")
        first = time.perf_counter() - started
        sample = range(min(3000, len(index)))
        started = time.perf_counter()
        plain_scan(index, sample)
        plain = len(sample) / (time.perf_counter() - started)
        print(f"  first scan: {len(index) / first:.0f} images/s, plain {plain:.0f}: {len(index) / first / plain:.2f} x")


if __name__ == "__main__":
    main()
