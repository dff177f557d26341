"""Made data of a report page, and checks of an HTML page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tessera.analysis.error_analysis import error_gains, error_items
from tessera.analysis.report.page_data import ReportData, RunInfo
from tessera.utils.config import TrainConfig
from tessera.utils.evaluation.average_precision import bootstrap_interval
from tessera.utils.evaluation.curves import summarize
from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.flags.val import ValConfig
from tessera.utils.report.results_csv import result_columns
from tessera.utils.seeding import sample_rng
from tests.data.made_index import write_images
from tests.utils.evaluation.made_images import accumulate, errors_of, index_of, random_images, share

SIZE = 200  # pixels of the images: made_images' boxes lie in them
HEBREW = "\u05e9\u05dc\u05d5\u05dd"
HOSTILE = ["<script>alert(1)</script>", "\u202eright to left", HEBREW, "a\x1b[2J\x00b", '" onload="alert(1)']


class Tags(HTMLParser):
    """Every tag of a page with its attributes; a tag that is left open fails."""

    VOID = frozenset({"meta", "link", "input", "br", "image", "rect", "line", "polyline", "circle", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())

    def count(self, tag: str) -> int:
        return sum(tag == name for name, _ in self.found)


def assert_safe(text: str, *, scripts: int) -> Tags:
    """The page is small, loads nothing, has no handlers or inline styles, and shows names as text."""
    tags = Tags(text)
    assert len(text.encode()) < 5_000_000 and tags.count("script") == scripts
    for tag, attrs in tags.found:
        assert not any(name.startswith("on") or name == "style" for name in attrs), (tag, attrs)
        for name in ("src", "href"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), (tag, attrs)
    assert "<script>alert" not in text and not {"\u202e", "\x1b", "\x00"} & set(text)
    return tags


def made_report_data(folder: Path, names: Sequence[str], images: int = 12, *, seed: int = 1, **more: Any) -> ReportData:
    """ReportData of a validation of random images in `folder`, with further values in `more`."""
    scenes = random_images(seed, images, len(names), coarse=False)
    paths = [str(path).encode() for path in write_images(folder / "images", [(SIZE, SIZE)] * images)]
    index = dataclasses.replace(
        index_of(scenes, len(names)),
        names=tuple(names),
        sizes_hw=np.full((images, 2), SIZE, np.int32),
        path_bytes=np.frombuffer(b"".join(paths), np.uint8),
        path_offsets=np.cumsum([0, *map(len, paths)]),
    )
    ranking = accumulate(scenes)
    metrics, curves = summarize(ranking, len(names))
    metrics = dataclasses.replace(metrics, names=tuple(names))
    errors = errors_of(scenes, len(names), metrics.confidence)
    gains = error_gains(share(scenes))
    facts = ReportData(
        Evaluation(metrics, curves, ranking, share(scenes)),
        errors,
        index,
        bootstrap_interval(ranking, sample_rng(0, 0, 0, "bootstrap")),
        gains,
        error_items(errors, gains, index),
        {},
        RunInfo(ValConfig(data="some.yaml"), "best.pt", 640, "cpu"),
        folder,
    )
    return dataclasses.replace(facts, **more)


def made_results(maps: Sequence[float]) -> pd.DataFrame:
    table = pd.DataFrame(0.5, index=range(len(maps)), columns=list(result_columns(("box", "obj"))))
    return table.assign(**{"epoch": range(len(maps)), "metrics/mAP_0.5:0.95": maps})


def trained(facts: ReportData, maps: Sequence[float]) -> ReportData:
    """Return the data at the end of a training with these epochs."""
    origin = RunInfo(TrainConfig(), "best.pt", 640, "cpu", 2, facts.index, len(maps), int(np.argmax(maps)))
    return dataclasses.replace(facts, origin=origin, results=made_results(maps))
