"""Pictures of what flipped between two sides: the objects that did, and what each side found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tessera.data.source.decode import read_image
from tessera.utils.errors import tolerate
from tessera.utils.evaluation.comparison.flips import Finds, Flips, ImageFlips
from tessera.utils.report.pictures import Annotations, save_grid
from tessera.utils.types import DatasetIndex


def write_flips(
    folder: Path, index: DatasetIndex, flips: Flips, a: Mapping[int, Finds], b: Mapping[int, Finds]
) -> None:
    """Write `flips/worse_01.jpg` …, the worst first, and `flips/better_01.jpg` …, a few of each.

    Args:
        folder: of the run.
        index: the split.
        flips: which images.
        a, b: what each side found on them.
    """
    for kind, images in (("worse", flips.worse), ("better", flips.better)):
        for number, one in enumerate(images, 1):
            with tolerate(f"picture of flips {kind}_{number:02}"):
                _write(folder / "flips" / f"{kind}_{number:02}.jpg", index, flips, one, a[one.image], b[one.image])


def _write(target: Path, index: DatasetIndex, flips: Flips, one: ImageFlips, a: Finds, b: Finds) -> None:
    """One image three times: the objects that flipped, A's finds, B's finds."""
    path = index.path(one.image)
    picture = read_image(path, rule=index.pixels)
    classes, boxes_xyxy = index.labels(one.image)
    flipped = np.concatenate((one.lost, one.gained))
    panels = [
        Annotations(boxes_xyxy[flipped], classes[flipped].astype(np.int64)),
        *(
            Annotations(side.boxes_xyxy, side.classes.astype(np.int64), side.scores, threshold=threshold)
            for side, threshold in ((a, flips.threshold_a), (b, flips.threshold_b))
        ),
    ]
    captions = [
        f"{len(one.lost)} lost, {len(one.gained)} gained: {path.name}",
        f"A: finds {a.found.sum()} of {len(a.found)}, {a.wrong.sum()} wrong",
        f"B: finds {b.found.sum()} of {len(b.found)}, {b.wrong.sum()} wrong",
    ]
    save_grid([picture] * len(panels), panels, index.names, captions, target)
