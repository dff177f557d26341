"""Charts of many classes and many objects: time and memory, as a multiple of those of COCO's 80 classes.

uv run python -m tests.benchmarks.charts
uv run python -m tests.benchmarks.charts --classes 80 1203 10000 --objects 5000000
"""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tessera.utils.evaluation.confusion import ConfusionMatrix, PairCounts
from tessera.utils.report.charts.labels import plot_labels
from tessera.utils.report.charts.validation import plot_validation
from tests.benchmarks.rounds import parser
from tests.utils.report.made_charts import curves, index, names


def cost(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and MiB that were allocated at most at once, measured in a second call."""
    started = time.perf_counter()
    call()
    seconds = time.perf_counter() - started
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak / 2**20


def main() -> None:
    """Print the table."""
    given = parser(__doc__, classes=[80, 1203, 10_000], objects=[50_000, 5_000_000]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, base = Path(folder), 0.0
        for count in given.classes:
            found, called = curves(count), names(count, "short")
            confusion = ConfusionMatrix.joined(count, [PairCounts(np.arange(count) * (count + 2), np.full(count, 9))])
            seconds, mib = cost(lambda: plot_validation(run, found, confusion, called))  # noqa: B023 - called at once
            base = base or seconds
            print(f"charts of a validation, {count:>6,} classes: {seconds / base:5.2f} x {base:.1f} s, {mib:6.0f} MiB")
        base = 0.0
        for count in given.objects:
            data = index(names(80, "short"), count)
            seconds, mib = cost(lambda: plot_labels(data, run / "labels.jpg"))  # noqa: B023 - called at once
            base = base or seconds
            print(f"labels.jpg, {count:>9,} objects:            {seconds / base:5.2f} x {base:.1f} s, {mib:6.0f} MiB")


if __name__ == "__main__":
    main()
