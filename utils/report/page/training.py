"""The curves of a training, from results.csv."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from tessera.utils.report.page.svg import line_chart

if TYPE_CHECKING:
    import pandas as pd  # a validation does without

_LOSS = re.compile(r"train/(.+)_loss")
_PANELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("mAP", {"metrics/mAP_0.5:0.95": "mAP50-95", "metrics/mAP_0.5": "mAP50"}),
    ("Precision and recall", {"metrics/precision": "precision", "metrics/recall": "recall"}),
    ("Learning rate", {"x/lr1": "weights", "x/lr2": "norm weights"}),
)
_TIMES: tuple[tuple[str, dict[str, str]], ...] = (
    ("Images per second", {"images_per_s": "training"}),
    ("Share of the time spent waiting for pictures", {"time/data_wait": "waiting"}),
)


class Panel(NamedTuple):
    """A chart with its heading."""

    title: str
    chart: Markup


def panels(results: pd.DataFrame, best: int | None) -> list[Panel]:
    """Losses, figures and rates over the epochs; without those that have no value.

    Args:
        results: as `read_results` returns them.
        best: the epoch that is marked.
    """
    losses = [match[1] for match in map(_LOSS.fullmatch, results.columns) if match]
    wanted = [(title, series) for title, series in _PANELS[:2]]
    wanted += [(f"Loss: {name}", {f"train/{name}_loss": "train", f"val/{name}_loss": "val"}) for name in losses]
    return _drawn([*wanted, *_PANELS[2:]], results, best)


def times(results: pd.DataFrame, best: int | None) -> list[Panel]:
    """What was measured with a clock, over the epochs; arguments of `panels`."""
    return _drawn(_TIMES, results, best)


def _drawn(wanted: Iterable[tuple[str, dict[str, str]]], results: pd.DataFrame, best: int | None) -> list[Panel]:
    epochs = results["epoch"].to_numpy(float)
    drawn = []
    for title, columns in wanted:
        series = {name: results[column].to_numpy(float) for column, name in columns.items()}
        series = {name: values for name, values in series.items() if np.isfinite(values).any()}
        if series:
            mark = float(best) if best is not None and best in epochs else None
            drawn.append(
                Panel(title, line_chart(f"{title} over the epochs", epochs, series, x_label="epoch", mark=mark))
            )
    return drawn


def validation_loss(results: pd.DataFrame) -> NDArray[np.float64]:
    """Sum of the losses of the validation, by epoch."""
    return results.filter(regex="^val/.*_loss$").sum(axis=1, skipna=False).to_numpy(float)


def data_wait(results: pd.DataFrame) -> float:
    """Share of the time that training waited for pictures, over the epochs that have times; NaN without one."""
    seconds, share = (results[column].to_numpy(float) for column in ("time/epoch_s", "time/data_wait"))
    known = np.isfinite(seconds) & np.isfinite(share)
    return float(np.average(share[known], weights=seconds[known])) if seconds[known].sum() > 0 else float("nan")
