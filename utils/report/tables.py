"""A validation as text: the table of its classes and the lines around it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from tessera.utils.text import table_row
from tessera.utils.types import Metrics

TABLE_COLUMNS = ("Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95")


def class_table(metrics: Metrics, names: Sequence[str]) -> pd.DataFrame:
    """Columns `TABLE_COLUMNS`; the row "all", then one for each class that has objects.

    Args:
        metrics: of a validation.
        names: class names by index.
    """
    rows: list[tuple[object, ...]] = [_overall(metrics)]
    for class_id, figures in zip(metrics.class_ids, metrics.per_class, strict=True):
        counts = metrics.images_per_class[class_id], metrics.objects_per_class[class_id]
        rows.append((names[class_id], *(int(n) for n in counts), *figures.tolist()))
    return pd.DataFrame(rows, columns=list(TABLE_COLUMNS))


def _overall(metrics: Metrics) -> tuple[str, int, int, float, float, float, float]:
    return "all", metrics.images, metrics.objects, metrics.precision, metrics.recall, metrics.map50, metrics.map


def table_header() -> str:
    """`Class Images Instances P R mAP50 mAP50-95`, aligned with `table_lines`."""
    return table_row(*TABLE_COLUMNS)


def table_lines(table: pd.DataFrame) -> list[str]:
    """Rows of `class_table` for the console, figures to three digits; a name that is too long is cut."""
    return [table_row(*row) for row in table.itertuples(index=False, name=None)]


def validation_line(metrics: Metrics) -> str:
    """The row "all", below `table_header`."""
    return table_row(*_overall(metrics))


def interval_line(metrics: Metrics, low: float, high: float) -> str:
    """mAP50-95 with its 95 % interval from `bootstrap_interval`, which is NaN where there is nothing to find."""
    if math.isnan(low):
        return f"mAP50-95 cannot be measured: no object in the labels of {metrics.images} images"
    return f"mAP50-95 {metrics.map:.3f}, 95 % interval {low:.3f} to {high:.3f} (bootstrap over {metrics.images} images)"


def speed_line(speed_ms: tuple[float, float, float], shape: Sequence[int]) -> str:
    """Milliseconds an image: preparation, inference, NMS; `shape` is the batch's (B, 3, H, W)."""
    preparation, inference, nms = speed_ms
    return (
        f"Speed: {preparation:.1f} ms preparation, {inference:.1f} ms inference, {nms:.1f} ms NMS per image "
        f"at shape ({', '.join(str(n) for n in shape)})"
    )
