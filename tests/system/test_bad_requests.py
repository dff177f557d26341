"""Requests that cannot be met, of every command: one message, the documented exit code, and no file touched."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tessera.commands import compare, detect, train, val
from tests.system.launch import Command
from tests.utils.exporting.made import ANCHORED, checkpoint, dataset

GOOD = {  # what each request begins with; `%` is the folder
    train: ["--data", "%/tiny.yaml", "--device", "cpu"],
    val: ["--weights", "%/best.pt", "--data", "%/tiny.yaml", "--device", "cpu"],
    compare: ["%/best.pt", "--device", "cpu"],
    detect: ["--weights", "%/best.pt", "--device", "cpu"],
}


REQUESTS: dict[str, tuple[ModuleType, list[str], int, tuple[str, ...]]] = {
    "errors at a threshold": (val, ["--find-errors", "--conf-thres", "0.3"], 2, ("--conf-thres 0.3", "at most 0.01")),
    "errors of one class": (
        val,
        ["--find-errors", "--single-cls"],
        2,
        ("--find-errors --single-cls", "Leave --single-cls out"),
    ),
    "errors at full speed": (val, ["--find-errors", "--task", "speed"], 2, ("--find-errors --task speed",)),
    "errors of no split": (val, ["--find-errors", "--task", "test"], 1, ("expected `test`",)),
    "requirement of a word": (compare, ["%/best.pt", "--require", "map"], 2, ("found 'map', expected a",)),
    "requirement of a typo": (
        compare,
        ["%/best.pt", "--require", "maps > 0"],
        2,
        ("'maps' is no metric", "Did you mean 'map'"),
    ),
    "interval of ms": (compare, ["%/best.pt", "--require", "ms.low < 1"], 2, ("'ms.low' is not known",)),
    "one model": (compare, [], 2, ("found 1 MODEL, expected two",)),
    "run without weights": (
        compare,
        ["%/shapes"],
        1,
        ("--b", "shapes: found a folder", "shapes/weights/best.pt either"),
    ),
    "text for a model": (compare, ["%/tiny.yaml"], 1, ("--b", "tiny.yaml: damaged, or not a checkpoint")),
    "text for an export": (val, ["--weights", "%/b.onnx", "--find-errors"], 1, ("b.onnx: ONNX Runtime",)),
    "runs of nobody": (detect, ["--source", "%", "--project", "~no-such-user/p"], 2, ("--project: found",)),
    "page of nothing": (train, ["--report"], 2, ("--report without --check-data",)),
    "page below a file": (train, ["--check-data", "--report", "%/tiny.yaml/x"], 1, ("--report", "folder")),
    "unknown objective": (train, ["--evolve", "2", "--objective", "mapp"], 2, ("Did you mean 'map'",)),
    "objective by 0": (train, ["--evolve", "2", "--objective", "map / 0"], 2, ("it divides by 0",)),
    "objective of no search": (train, ["--objective", "map"], 2, ("without --evolve", "Add --evolve N")),
    "search that is not there": (
        train,
        ["--evolve", "2", "--resume", "%/nix", "--hyp", "hyp.short.yaml"],
        1,
        ("nix: no directory of a search",),
    ),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requests")
    data = dataset(folder, train=4, val=3)
    checkpoint(folder / "best.pt", ANCHORED, str(data))
    (folder / "b.onnx").write_text("no export")
    return folder


def files(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("name", REQUESTS)
def test_one_message_and_nothing_is_touched(
    name: str, pristine: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, words, code, said = REQUESTS[name]
    folder = tmp_path / "it's ü"
    shutil.copytree(pristine, folder)
    data = yaml.safe_load((folder / "tiny.yaml").read_text())
    (folder / "tiny.yaml").write_text(yaml.safe_dump({**data, "path": str(folder / "shapes")}))
    monkeypatch.chdir(folder)  # where runs would go
    before = files(folder)
    outcome = command(module.main, *(word.replace("%", str(folder)) for word in [*GOOD[module], *words]))
    assert outcome.code == code, outcome.said
    assert "Traceback" not in outcome.err + outcome.out and outcome.err.count("error: ") == 1, outcome.said
    message = outcome.err[outcome.err.index("error: ") :]
    for part in said:
        assert part in message, outcome.said
    assert files(folder) == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder into which root cannot write either")
@pytest.mark.parametrize("module", [train, val, detect])
def test_a_working_directory_that_cannot_be_written_is_one_message(
    module: ModuleType, pristine: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/sys")
    words = {train: ["--epochs", "1", "--imgsz", "64"], val: [], detect: ["--source", "%/shapes/images/val"]}[module]
    outcome = command(module.main, *(word.replace("%", str(pristine)) for word in [*GOOD[module], *words]))
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    name = module.__name__.rpartition(".")[2]
    assert outcome.code == 1 and "Traceback" not in outcome.err, outcome.said
    assert line.startswith(f"error: Run directory /sys/runs/{name}/exp: cannot be made or written to"), outcome.said
