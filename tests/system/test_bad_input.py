"""What a user gets wrong ends in one clear message and an exit code, without a traceback or half a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from tessera.commands import train, val
from tessera.utils.training import data
from tests.system.launch import ROOT, Command, python_command, run_command, torchrun
from tests.system.tiny import flags, make_data

TRAIN = ROOT / "train.py"
Mistake = Callable[[Path], list[str]]


def edit_yaml(file: Path, **changes: object) -> Path:
    content = {**yaml.safe_load(file.read_text()), **changes}
    copy = file.with_name("changed.yaml")
    copy.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
    return copy


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def label(folder: Path, text: str) -> list[str]:
    first = min((folder / "shapes" / "labels" / "train").glob("*.txt"))
    first.write_text(text)
    return []


def every_label(folder: Path, text: str | None) -> list[str]:
    for path in (folder / "shapes" / "labels" / "train").glob("*.txt"):
        path.unlink() if text is None else path.write_text(text)
    return []


def foreign_checkpoint(folder: Path) -> str:
    torch.save({"weights": torch.zeros(3)}, folder / "foreign.pt")
    return str(folder / "foreign.pt")


def read_only(folder: Path) -> list[str]:
    """A project folder that cannot be made, because a file has its name."""
    write(folder / "blocked", "")
    return ["--project", str(folder / "blocked" / "runs")]


HYP = (ROOT / "data" / "hyps" / "hyp.scratch-low.yaml").read_text()
MISTAKES: dict[str, tuple[Mistake, int, tuple[str, ...]]] = {
    "unknown flag": (lambda d: ["--epoches", "3"], 2, ("--epoches", "Did you mean '--epochs'")),
    "flag's value": (lambda d: ["--epochs", "many"], 2, ("--epochs", "'many'", "whole number")),
    "unknown tracker": (lambda d: ["--loggers", "wanb"], 2, ("wanb", "Did you mean 'wandb'")),
    "no such device": (lambda d: ["--device", "7"], 2, ("--device 7", "--device cpu")),
    "missing dataset": (lambda d: ["--data", "coc0128.yaml"], 2, ("coc0128.yaml", "coco128.yaml")),
    "missing weights": (lambda d: ["--weights", "nowhere/best.pt"], 1, ("nowhere/best.pt", "tried")),
    "foreign weights": (lambda d: ["--weights", foreign_checkpoint(d)], 1, ("foreign.pt", "Expected")),
    "damaged weights": (lambda d: ["--weights", write(d / "torn.pt", "PK\x03\x04 torn")], 1, ("torn.pt",)),
    "missing hyp": (lambda d: ["--hyp", "hyp.scratch-lo.yaml"], 2, ("Did you mean 'hyp.scratch-low.yaml'",)),
    "unknown hyp key": (lambda d: ["--hyp", write(d / "h.yaml", HYP + "lr1: 0.1\n")], 2, ("lr1", "Did you mean 'lr")),
    "hyp lacks a key": (lambda d: ["--hyp", write(d / "h.yaml", "lr0: 0.01\n")], 2, ("missing", "lrf")),
    "class weight of no class": (
        lambda d: ["--hyp", write(d / "h.yaml", HYP + "class_weights: {star: 2, circel: 3}\n")],
        2,
        ("class_weights", "no class 'circel'", "Did you mean 'circle'"),
    ),
    "missing cfg": (lambda d: ["--cfg", "yolov5q.yaml"], 2, ("yolov5q.yaml", "yolov5n.yaml")),
    "wrong module in cfg": (
        lambda d: ["--cfg", write(d / "m.yaml", (ROOT / "models/yolov5n.yaml").read_text().replace("SPPF", "SPFF"))],
        2,
        ("m.yaml:", "SPFF", "SPPF"),
    ),
    "wrong YAML": (lambda d: ["--data", write(d / "bad.yaml", "names: [a, b\ntrain: x\n")], 2, ("bad.yaml:2",)),
    "misspelt key": (lambda d: ["--data", str(edit_yaml(d / "tiny.yaml", vall="x", val=None))], 2, ("vall", "val")),
    "nc mismatch": (lambda d: ["--data", str(edit_yaml(d / "tiny.yaml", nc=9))], 2, ("nc", "9", "6")),
    "missing images": (
        lambda d: ["--data", str(edit_yaml(d / "tiny.yaml", train="images/trian"))],
        1,
        ("images/trian",),
    ),
    "class beyond nc": (lambda d: label(d, "7 0.5 0.5 0.1 0.1\n"), 1, (".txt:1: class 7", "names 6 classes")),
    "no labels": (lambda d: every_label(d, None), 1, ("no labels found", "Looked for")),
    "overlap without tile": (lambda d: ["--overlap", "0.3"], 2, ("--overlap without --tile",)),
    "tile below the objects": (
        lambda d: ["--tile", "64", *every_label(d, "0 0.5 0.5 0.9 0.2\n")],
        1,
        ("boxes of train are larger than a tile, so that no", "half of all are longer than 8"),
    ),
    "unwritable run folder": (read_only, 1, ("cannot be made or written to", "--project")),
    "nothing to resume": (
        lambda d: ["--resume", "--cfg", "", "--project", str(d / "empty")],
        1,
        ("no checkpoint", "--resume path"),
    ),
    "script in download": (
        lambda d: [
            "--data",
            str(edit_yaml(d / "tiny.yaml", path="nowhere", download="import os; os.system('touch hacked')")),
        ],
        2,
        ("download", "never run"),
    ),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data")).parent


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "data"
    shutil.copytree(pristine, copy)
    edit_yaml(copy / "tiny.yaml", path=str(copy / "shapes")).replace(copy / "tiny.yaml")
    return copy


@pytest.mark.parametrize("name", MISTAKES)
def test_one_clear_message(name: str, folder: Path, tmp_path: Path, command: Command) -> None:
    make, code, words = MISTAKES[name]
    args = flags(folder / "tiny.yaml", tmp_path / "runs", "--epochs", "1", *make(folder))
    outcome = command(train.main, *args)
    assert outcome.code == code, outcome.said
    assert "Traceback" not in outcome.err + outcome.out, outcome.said
    assert outcome.err.count("error: ") == 1, outcome.said
    message = outcome.err[outcome.err.index("error: ") :]
    for word in words:
        assert word in message, outcome.said
    assert not list((tmp_path / "runs").rglob("*")), "no half-written run"


def test_bad_rows_leave_the_image_out_with_file_and_line(folder: Path, tmp_path: Path, command: Command) -> None:
    label(folder, "0 0.5 0.5 0.1\n")
    outcome = command(train.main, *flags(folder / "tiny.yaml", tmp_path / "runs", "--epochs", "1"))
    assert outcome.code == 0, outcome.said
    assert ".txt:1: " in outcome.err
    checked = command(train.main, "--data", str(folder / "tiny.yaml"), "--check-data")
    assert ".txt:1: " in checked.out, checked.said


def test_check_data_fails_where_training_would_not_be_safe(folder: Path, command: Command) -> None:
    label(folder, "7 0.5 0.5 0.1 0.1\n")
    outcome = command(train.main, "--data", str(folder / "tiny.yaml"), "--check-data")
    assert outcome.code == 1, outcome.said
    assert "class 7" in outcome.out


@pytest.mark.parametrize("flag", ["--weights", "--project"])
def test_flags_are_checked_before_the_dataset_is_read(
    folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("the dataset was read")

    monkeypatch.setattr(data, "build_index", read)
    (tmp_path / "file").write_text("")
    wrong = {"--weights": str(tmp_path / "nowhere.pt"), "--project": str(tmp_path / "file")}
    outcome = command(train.main, *flags(folder / "tiny.yaml", tmp_path / "runs", flag, wrong[flag]))
    assert outcome.code == 1 and outcome.err.count("error: ") == 1, outcome.said
    assert wrong[flag] in outcome.err and not list((tmp_path / "runs").rglob("*"))


def test_weights_of_another_architecture(folder: Path, tmp_path: Path, shared: Path, command: Command) -> None:
    args = ["--weights", str(shared / "weights" / "yolov5n.pt"), "--cfg", "yolov5s.yaml", "--epochs", "1"]
    outcome = command(train.main, *flags(folder / "tiny.yaml", tmp_path / "runs", *args))
    assert outcome.code == 1, outcome.said
    assert "the weights do not fit the architecture" in outcome.err


def test_val_with_another_number_of_classes(folder: Path, tmp_path: Path, shared: Path, command: Command) -> None:
    weights = str(shared / "weights" / "yolov5n.pt")
    outcome = command(val.main, "--weights", weights, "--data", str(folder / "tiny.yaml"), "--project", str(tmp_path))
    assert outcome.code == 1, outcome.said
    assert "80 classes" in outcome.err and "names 6" in outcome.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        pytest.param(["--batch", "7"], "2 ranks do not divide it. Use 6 or 8", marks=pytest.mark.slow),
        (["--weights", "nowhere/best.pt"], "no such file"),
    ],
)
def test_two_ranks_end_together_with_one_message(folder: Path, tmp_path: Path, more: list[str], message: str) -> None:
    outcome = torchrun(TRAIN, *flags(folder / "tiny.yaml", tmp_path / "runs", *more))
    assert outcome.code != 0
    assert outcome.err.count("error: ") == 1, outcome.said
    assert message in outcome.err, outcome.said
    assert not list((tmp_path / "runs").rglob("*"))


@pytest.mark.slow
def test_a_read_only_working_directory_is_one_message(folder: Path, tmp_path: Path) -> None:
    words = flags(folder / "tiny.yaml", Path("runs"), "--resume", "auto", "--name", "night")
    mounted = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && cd "$0" && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", mounted, str(folder)]
    if shutil.which("unshare") is None or run_command([*inside, "true"]).code != 0:
        pytest.skip("needs the right to mount a folder read-only")
    outcome = run_command([*inside, *python_command(TRAIN, *words)])
    assert outcome.code == 1 and outcome.err.count("error: ") == 1 and "Traceback" not in outcome.err, outcome.said
    assert f"Run directory {folder}/runs/night: cannot be made or written to" in outcome.err, outcome.said
