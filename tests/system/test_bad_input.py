"""Mistakes of a user, in every command: one clear message, the documented exit code, and no file touched."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import yaml

from tessera.commands import compare, detect, export, train, val
from tessera.utils.training import data
from tests.deploy.exporting.made import ANCHORED, checkpoint, dataset
from tests.deploy.foreign.made import Marking, with_at
from tests.system.launch import ROOT, Command, torchrun
from tests.system.tiny import FLAGS, flags

GOOD = {  # what each command line begins with; % is the folder
    train: ["--data", "%/tiny.yaml", "--project", "%/runs", "--epochs", "1", *FLAGS],
    val: ["--data", "%/tiny.yaml", "--project", "%/runs", "--weights", "%/best.pt", "--device", "cpu"],
    compare: ["%/best.pt", "--device", "cpu", "--workers", "0"],
    detect: ["--weights", "%/best.pt", "--device", "cpu", "--project", "%/runs"],
    export: ["--device", "cpu", "--include", "safetensors"],
}
HYP = (ROOT / "data" / "hyps" / "hyp.scratch-low.yaml").read_text()
CFG = (ROOT / "models" / "yolov5n.yaml").read_text()


class Made(NamedTuple):
    """Words of a command line, for which `make` writes files to the folder."""

    words: str
    make: Callable[[Path], object] = lambda folder: None


def written(words: str, name: str, text: str = "") -> Made:
    """With a file in the folder."""
    return Made(words, lambda folder: (folder / name).write_text(text))


def described(words: str = "--data %/changed.yaml", **changes: object) -> Made:
    """With a dataset YAML in which some keys are others, or not there."""

    def make(folder: Path) -> None:
        content = {**yaml.safe_load((folder / "tiny.yaml").read_text()), **changes}
        (folder / "changed.yaml").write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))

    return Made(words, make)


def labelled(text: str | None, words: str = "", split: str = "train") -> Made:
    """With other labels of all images of a split; None = no files."""

    def make(folder: Path) -> None:
        for path in (folder / "shapes" / "labels" / split).glob("*.txt"):
            path.unlink() if text is None else path.write_text(text)

    return Made(words, make)


def damaged(folder: Path, kind: str) -> None:
    path = folder / "w.pt"
    content = torch.load(folder / "best.pt", weights_only=True)
    if kind == "of a call":
        torch.save({**content, "optimizer": Marking(os.system, f"touch '{folder.parent}/mark'")}, path)
    elif kind == "cut":
        path.write_bytes((folder / "best.pt").read_bytes()[:-9999])
    elif kind == "of NaN":
        name = next(name for name, value in content["ema"].items() if value.is_floating_point())
        torch.save({**content, "ema": {**content["ema"], name: with_at(content["ema"][name], float("nan"))}}, path)
    elif kind == "of nothing known":
        torch.save({"weights": torch.zeros(3)}, path)
    else:
        os.mkfifo(path)


MISTAKES: dict[str, tuple[ModuleType, str | Made, int, str | tuple[str, ...]]] = {
    "unknown flag": (train, "--epoches 3", 2, ("--epoches", "Did you mean '--epochs'")),
    "flag's value": (train, "--epochs many", 2, ("--epochs", "'many'", "whole number")),
    "no such device": (train, "--device 7", 2, ("--device 7", "--device cpu")),
    "missing dataset": (train, "--data coc0128.yaml", 2, ("coc0128.yaml", "coco128.yaml")),
    "missing weights": (train, "--weights nowhere/best.pt", 1, ("nowhere/best.pt", "tried")),
    "weights of another model": (train, "--weights %/best.pt --cfg yolov5s.yaml", 1, "do not fit the architecture"),
    "missing hyp": (train, "--hyp hyp.scratch-lo.yaml", 2, "Did you mean 'hyp.scratch-low.yaml'"),
    "unknown hyp key": (train, written("--hyp %/h.yaml", "h.yaml", f"{HYP}lr1: 0.1\n"), 2, ("lr1", "Did you mean 'lr")),
    "class weight of no class": (
        train,
        written("--hyp %/h.yaml", "h.yaml", f"{HYP}class_weights: {{star: 2, circel: 3}}\n"),
        2,
        ("class_weights", "no class 'circel'", "Did you mean 'circle'"),
    ),
    "missing cfg": (train, "--cfg yolov5q.yaml", 2, ("yolov5q.yaml", "yolov5n.yaml")),
    "wrong module in cfg": (
        train,
        written("--cfg %/m.yaml", "m.yaml", CFG.replace("SPPF", "SPFF")),
        2,
        ("m.yaml:", "SPFF", "SPPF"),
    ),
    "missing images": (train, described(train="images/trian"), 1, "images/trian"),
    "script in download": (train, described(path="nowhere", download="import os"), 2, ("download", "never run")),
    "class beyond nc": (train, labelled("7 0.5 0.5 0.1 0.1\n"), 1, (".txt:1: class 7", "names 3 classes")),
    "no labels": (train, labelled(None), 1, ("no labels found", "none with a usable row")),
    "overlap without tile": (train, "--overlap 0.3", 2, "--overlap without --tile"),
    "tile below the objects": (
        train,
        labelled("0 0.5 0.5 0.9 0.2\n", "--tile 64"),
        1,
        ("boxes of train are larger than a tile", "median long side 98"),
    ),
    "a file for a run directory": (train, "--project %/best.pt/runs", 1, ("cannot be made or written to", "--project")),
    "nothing to resume": (train, "--resume --cfg '' --project %/empty", 1, ("no checkpoint", "--resume path")),
    "page of nothing": (train, "--report", 2, "--report without --check-data"),
    "check of a run": (train, "--check-data --resume runs/exp", 2, "--check-data with --resume: it checks the dataset"),
    "page below a file": (train, "--check-data --report %/tiny.yaml/x", 1, ("--report", "folder")),
    "unknown objective": (train, "--evolve 2 --objective mapp", 2, "Did you mean 'map'"),
    "missing search": (train, "--evolve 2 --resume %/nix --hyp hyp.short.yaml", 1, "nix: no directory of a search"),
    "errors at a threshold": (val, "--find-errors --conf-thres 0.3", 2, ("--conf-thres 0.3", "at most 0.01")),
    "errors of one class": (val, "--find-errors --single-cls", 2, "Leave out --single-cls"),
    "errors at full speed": (val, "--find-errors --task speed", 2, "--find-errors --task speed"),
    "errors of no split": (val, "--find-errors --task test", 1, "expected `test`"),
    "text for an export": (val, written("--weights %/b.onnx --find-errors", "b.onnx"), 1, "b.onnx: ONNX Runtime"),
    "missing export": (val, "--weights %/gone.onnx", 1, "gone.onnx"),
    "program that is not trusted": (val, "--weights %/best.torchscript", 1, ("best.torchscript: ", "program")),
    "classes of an export": (
        val,
        described("--weights %/best.torchscript --trust-file --data %/changed.yaml", names=[*"abcdefghi"]),
        1,
        ("3 classes", "changed.yaml", "9", "none of them by the same name"),
    ),
    **{
        f"{flag} of an export": (val, f"--weights %/best.torchscript --trust-file {flag}", 2, f"{flag}: ")
        for flag in ("--augment", "--end2end", "--half")
    },
    "requirement of a word": (compare, "%/best.pt --require map", 2, "found 'map', expected a"),
    "missing model": (compare, "%/gone.pt", 1, "--b %/gone.pt: no such file"),
    "run without weights": (compare, "%/shapes", 1, ("--b", "found a folder", "shapes/weights/best.pt either")),
    "text for a model": (compare, "%/tiny.yaml", 1, ("--b", "tiny.yaml: damaged, or not a checkpoint")),
    "models of other classes": (
        compare,
        described("%/best.pt --data %/changed.yaml", names=[*"abcdefghi"]),
        1,
        "--a %/best.pt knows 3 classes, but %/changed.yaml has 9, none",
    ),
    "models of two datasets": (
        compare,
        Made("%/other.pt", lambda d: checkpoint(d / "other.pt", ANCHORED, "elsewhere.yaml")),
        2,
        ("were trained on different datasets: --a", "on elsewhere.yaml. Give --data."),
    ),
    "comparison without images": (
        compare,
        described("%/best.pt --data %/changed.yaml", val="labels"),
        1,
        "no image found",
    ),
    "comparison without objects": (
        compare,
        labelled("", "%/best.pt --data %/tiny.yaml", "val"),
        1,
        "no object in the labels of the 3 images of 'val'",
    ),
    "run directory of nobody": (detect, "--source % --project ~no-such-user/p", 2, "--project: found"),
    "missing image": (detect, "--source nowhere.jpg", 1, "--source nowhere.jpg: no such file or folder"),
    "no source": (detect, "", 2, "--source: found nothing"),
    "text for weights": (detect, "--source % --weights %/tiny.yaml", 1, "damaged, or not a checkpoint: found text"),
    "unknown class": (detect, "--source % --classes circel", 2, "no class 'circel'. Did you mean 'circle'?"),
    "confidence of 2": (detect, "--source % --conf-thres 2", 2, "found '2', expected a number from 0 to 1"),
    "a file for detections": (detect, "--source %/shapes --project %/tiny.yaml", 1, "tiny.yaml"),
    "name of a folder": (detect, "--source %/shapes --name .", 2, "--name '.': expected a name"),
    **{
        f"weights {kind}, {module.__name__.rpartition('.')[2]}": (
            module,
            Made(words, lambda folder, kind=kind: damaged(folder, kind)),  # type: ignore[misc]
            1,
            "w.pt",
        )
        for module, words in (
            (train, "--cfg '' --weights %/w.pt"),
            (val, "--weights %/w.pt"),
            (detect, "--source %/shapes --weights %/w.pt"),
            (export, "--weights %/w.pt"),
        )
        for kind in ("of a call", "cut", "of NaN", "of nothing known", "that are a pipe")
    },
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    weights = checkpoint(folder / "best.pt", ANCHORED, str(dataset(folder, train=4, val=3)))
    export.run(weights=str(weights), include=["torchscript"], imgsz=96, device="cpu")
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    copy = shutil.copytree(pristine, tmp_path / "it's ü")
    content = yaml.safe_load((copy / "tiny.yaml").read_text())
    (copy / "tiny.yaml").write_text(yaml.safe_dump({**content, "path": str(copy / "shapes")}))
    (copy / "runs").mkdir()
    return copy


def files(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("name", MISTAKES)
def test_one_clear_message(name: str, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    module, made, code, expected = MISTAKES[name]
    made = made if isinstance(made, Made) else Made(made)
    made.make(folder)
    monkeypatch.chdir(folder)  # where runs would go
    before = files(folder)
    words = [*GOOD[module], *shlex.split(made.words)]
    outcome = command(module.main, *(word.replace("%", str(folder)) for word in words))
    assert outcome.code == code, outcome.said
    assert "Traceback" not in outcome.err + outcome.out and outcome.err.count("error: ") == 1, outcome.said
    message = outcome.err[outcome.err.index("error: ") :]
    for part in [expected] if isinstance(expected, str) else expected:
        assert part.replace("%", str(folder)) in message, outcome.said
    assert files(folder) == before, "no half-written run"


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder into which root cannot write either")
@pytest.mark.parametrize("module", [train, val, detect])
def test_a_working_directory_that_cannot_be_written_is_one_message(
    module: ModuleType, pristine: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/sys")
    name = module.__name__.rpartition(".")[2]
    words = [*GOOD[module], "--project", f"runs/{name}", *(["--source", "%/shapes"] if module is detect else [])]
    outcome = command(module.main, *(word.replace("%", str(pristine)) for word in words))
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert outcome.code == 1 and "Traceback" not in outcome.err, outcome.said
    assert line.startswith(f"error: Run directory /sys/runs/{name}/exp: cannot be made or written to"), outcome.said


def test_bad_rows_leave_the_image_out_with_file_and_line(folder: Path, tmp_path: Path, command: Command) -> None:
    min((folder / "shapes" / "labels" / "train").glob("*.txt")).write_text("0 0.5 0.5 0.1\n")
    outcome = command(train.main, *flags(folder / "tiny.yaml", tmp_path / "runs", "--epochs", "1"))
    assert outcome.code == 0 and ".txt:1: " in outcome.err, outcome.said


@pytest.mark.parametrize("flag", ["--weights", "--project"])
def test_flags_are_checked_before_the_dataset_is_read(
    folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("the dataset was read")

    monkeypatch.setattr(data, "build_index", read)
    wrong = {"--weights": str(tmp_path / "nowhere.pt"), "--project": str(folder / "tiny.yaml")}
    outcome = command(train.main, *flags(folder / "tiny.yaml", tmp_path / "runs", flag, wrong[flag]))
    assert outcome.code == 1 and outcome.err.count("error: ") == 1 and wrong[flag] in outcome.err, outcome.said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "message"),
    [(["--batch", "7"], "2 ranks do not divide it. Use 6 or 8"), (["--weights", "nowhere/best.pt"], "no such file")],
)
def test_two_ranks_end_together_with_one_message(folder: Path, tmp_path: Path, more: list[str], message: str) -> None:
    outcome = torchrun(ROOT / "train.py", *flags(folder / "tiny.yaml", tmp_path / "runs", *more))
    assert outcome.code != 0
    assert outcome.err.count("error: ") == 1 and message in outcome.err, outcome.said
    assert not list((tmp_path / "runs").rglob("*"))
