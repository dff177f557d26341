"""A small detector, detect.py runs with it, and checks of their outputs."""

from __future__ import annotations

import csv
import json
import logging
import tempfile
import unicodedata
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tessera.commands import detect
from tessera.deploy.inference.sources.video import Capture
from tessera.models.detector import DetectionModel
from tessera.utils.checkpoints.format import describe_metrics, describe_run, save_checkpoint
from tessera.utils.errors import UserError
from tessera.utils.machine.opencv import cv2
from tests.deploy.exporting.made import ANCHORED, checkpoint, lively
from tests.hostile.expect import checked, raw_characters

_kept = ExitStack()
FLAGS: dict[str, Any] = {"device": "cpu", "imgsz": 64, "max_det": 4}


@cache
def weights() -> str:
    """A checkpoint that detects something in every image; made once, for all cases."""
    folder = _kept.enter_context(tempfile.TemporaryDirectory(prefix="hostile-weights"))
    return str(checkpoint(Path(folder) / "best.pt", ANCHORED))


def weights_with(names: list[str], path: Path) -> str:
    model = lively(DetectionModel({**ANCHORED, "nc": len(names)}, names=tuple(names)))
    run = describe_run(model, {"data": "made.yaml"}, {}, 64, "c0ffee")
    save_checkpoint(path, {**run, **describe_metrics(None), "ema": model.state_dict(), "epoch": 0})
    return str(path)


def found(**flags: Any) -> detect.DetectionSummary | str:
    """What a run of detect.py gives, or its one message; what it says on the way is clean."""
    handler = _Checked()
    logging.getLogger().addHandler(handler)
    try:
        return detect.run(**{**FLAGS, **flags, "weights": flags.get("weights") or weights()})
    except UserError as error:
        return checked(str(error))
    finally:
        logging.getLogger().removeHandler(handler)


class _Checked(logging.Handler):
    """The console shows escapes; a line must be short besides."""

    def emit(self, record: logging.LogRecord) -> None:
        assert len(record.getMessage()) < 9000, record.getMessage()[:500]


def require_whole(folder: Path) -> dict[str, int]:
    """Make sure that every file of a folder of results can be read from end to end; counts by kind."""
    counts = {"images": 0, "videos": 0, "frames": 0, "labels": 0, "crops": 0, "rows": 0, "lines": 0}
    for path in sorted(folder.rglob("*")):
        top = path.relative_to(folder).parts[0]
        if path.is_dir():
            continue
        assert ".tmp" not in path.name, f"left behind: {path!r}"
        if path == folder / "predictions.csv":
            with path.open(newline="", encoding="utf-8") as file:
                header, *rows = csv.reader(file)
            assert all(len(row) == len(header) for row in rows)
            assert not any(
                cell.startswith(("=", "+", "-", "@", "\t", "\r")) for row in rows for cell in row[:2] if cell != "-"
            )
            assert all(0 <= float(row[2]) <= 1 for row in rows)
            counts["rows"] = len(rows)
        elif path == folder / "predictions.jsonl":
            raw = path.read_bytes()
            assert raw.endswith(b"\n")
            values = [json.loads(line, parse_constant=_no_constant) for line in raw.splitlines()]
            counts["lines"] = sum("detections" in line for line in values)
        elif top == "labels" and path.suffix == ".txt":
            for line in path.read_text().splitlines():
                assert len([float(cell) for cell in line.split()]) in (5, 6), line
            counts["labels"] += 1
        elif path.suffix == ".mp4":
            counts["videos"] += 1
            counts["frames"] += frames_of(path)
        else:
            image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
            assert image is not None, f"{path!r} does not decode"
            counts["crops" if top == "crops" else "images"] += 1
    return counts


def require_all(outcome: detect.DetectionSummary) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Make sure that each result has its files and each failure is one clean line; counts, and lines with results."""
    assert outcome.folder is not None, outcome
    counts = require_whole(outcome.folder)
    lines = [json.loads(line) for line in (outcome.folder / "predictions.jsonl").read_text().splitlines()][1:]
    results = [line for line in lines if "detections" in line]
    boxes = sum(len(line["detections"]) for line in results)
    assert counts["lines"] == counts["labels"] == outcome.images == len(results), (counts, outcome)
    assert counts["crops"] == counts["rows"] == outcome.detections == boxes, (counts, boxes)
    # On a file system that takes these names for one, none may meet either.
    paths = [str(path.relative_to(outcome.folder)) for path in outcome.folder.rglob("*") if path.is_file()]
    assert len({unicodedata.normalize("NFC", path.casefold()) for path in paths}) == len(paths), paths
    for message in outcome.failures:
        assert len(message.splitlines()) == 1 and len(message) < 1000 and not raw_characters(message), message
    return counts, results


def frames_of(path: Path) -> int:
    with Capture(str(path)) as capture:
        assert capture.is_open, f"{path!r} is no video"
        stated, count = capture.facts.frames, 0
        while capture.grab():
            assert capture.retrieve() is not None
            count += 1
    assert count == stated, (path, count, stated)
    return count


def write_video(path: Path, frames: list[np.ndarray[Any, np.dtype[np.uint8]]], codec: str = "mp4v") -> Path:
    height, width = frames[0].shape[:2]
    with tempfile.TemporaryDirectory() as folder:  # OpenCV takes no name that is not UTF-8
        made = Path(folder) / f"made{'.avi' if codec == 'MJPG' else '.mp4'}"
        writer = cv2.VideoWriter(str(made), cv2.CAP_FFMPEG, cv2.VideoWriter.fourcc(*codec), 10, (width, height))
        assert writer.isOpened(), codec
        for frame in frames:
            writer.write(frame)
        writer.release()
        path.write_bytes(made.read_bytes())
    return path


def _no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")
