"""docs/migrating.md says what the program does; the whole of it is run by tests/system/migrating.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.utils.config import TrainConfig
from tessera.utils.flags.detect import DetectConfig
from tessera.utils.flags.val import ValConfig
from tests.system.migrating import (
    BAD,
    COMMANDS,
    DATA,
    DETECT_FLAGS,
    HYPS,
    MODELS,
    PAGE,
    PYTHON,
    TRAIN_FLAGS,
    VAL_FLAGS,
    WEIGHTS,
    Row,
    flags_table,
    run,
    scratch,
)


def row_of(typed: str) -> Row:
    (row,) = [row for row in COMMANDS if row.typed.startswith(typed)]
    return row


def test_the_page_is_that_of_the_program() -> None:
    lines = PAGE.read_text().splitlines()
    flags = [*flags_table(TrainConfig, TRAIN_FLAGS), *flags_table(ValConfig, VAL_FLAGS)]
    flags += flags_table(DetectConfig, DETECT_FLAGS)
    assert [line for line in flags if line not in lines] == []
    names = [row.typed for row in (*COMMANDS, *PYTHON, *HYPS, *DATA, *WEIGHTS)] + [f"models/{m}.yaml" for m in MODELS]
    assert [name for name in names if not any(line.startswith(f"| `{name}` | ") for line in lines)] == []
    assert not any(BAD in line for line in lines)


@pytest.mark.slow
def test_some_of_its_commands(shared: Path, tmp_path: Path) -> None:
    env = scratch(tmp_path, shared / "weights" / "yolov5n.pt")
    lines = PAGE.read_text().splitlines()
    for typed in (
        "python train.py --data coco128.yaml --weights yolov5s.pt --quad",
        "python val.py --imgsz 64 --batch 32 --weights runs/train/exp/weights/best.pt",
        "python val.py --weights yolov5x.pt yolov5l6.pt",
        "python detect.py --weights yolov5s.pt --source datasets/coco128",
    ):
        row = row_of(typed)
        assert row.line(run(row, tmp_path, env)) in lines
