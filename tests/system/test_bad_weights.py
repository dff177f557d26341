"""What a command says of a weight file that it cannot take: one message, and nothing is run or left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tessera.commands import detect, export, train, val
from tessera.data.source.drawn_shapes import NAMES
from tests.hostile.expect import checked
from tests.system.tiny import flags, make_data
from tests.utils.checkpoints.foreign.made import LAST, MIDDLE, Marking, Tensors, save, small_yolox, with_at


@pytest.fixture(scope="module")
def small(shared: Path) -> Tensors:
    return small_yolox(shared)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), train=4, val=2)


def command(name: str, weights: Path, data: Path, project: Path) -> tuple[Callable[[list[str]], int], list[str]]:
    common = ["--weights", str(weights), "--device", "cpu", "--imgsz", "64"]
    if name == "train":
        return train.main, flags(data, project, "--cfg", "", "--weights", str(weights), "--epochs", "1")
    if name == "val":
        return val.main, [*common, "--data", str(data), "--project", str(project)]
    if name == "detect":
        pictures = data.parent / "shapes" / "images" / "val"
        return detect.main, [*common, "--source", str(pictures), "--project", str(project)]
    return export.main, ["--weights", str(weights), "--device", "cpu", "--include", "safetensors"]


WRONG = ["a call", "cut", "numbers", "fifo"]


@pytest.mark.parametrize("name", ["train", "val", "detect", "export"])
@pytest.mark.parametrize("kind", WRONG)
def test_each_command_says_it_once(
    kind: str, name: str, small: Tensors, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, path, mark = tmp_path / "weights", tmp_path / "weights" / "yolox_s.pth", tmp_path / "mark"
    place.mkdir()
    if kind == "a call":
        torch.save({"model": small, "optimizer": Marking(os.system, f"touch {mark}")}, path)
    elif kind == "cut":
        path.write_bytes(save(path, {"model": small}).read_bytes()[:-9999])
    elif kind == "numbers":
        save(path, {"model": {**small, LAST: with_at(small[LAST], float("nan"))}})
    else:
        os.mkfifo(path)
    main, args = command(name, path, data, tmp_path / "runs")
    code = main(args)
    out, err = capsys.readouterr()
    assert code == 1 and err.count("error: ") == 1 and "Traceback" not in out + err, out + err
    assert "yolox_s.pth" in checked(err[err.index("error: ") :].strip())
    assert not mark.exists() and [*place.iterdir()] == [path] and not [*(tmp_path / "runs").rglob("*")]


@pytest.mark.slow
def test_training_takes_what_fits_and_says_what_does_not(
    shared: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where validation refuses: a missing layer may start anew."""
    tensors = {name: tensor for name, tensor in small_yolox(shared, len(NAMES)).items() if name != MIDDLE}
    main, args = command("train", save(tmp_path / "x.pth", {"model": tensors}), data, tmp_path / "runs")
    code = main(args)
    said = capsys.readouterr().err
    assert code == 0, said
    assert "Loaded " in said and "model.6.m.0.cv1.conv.weight is not in the checkpoint" in said, said
