"""Tests of the verification: its table and the files that it refuses."""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tessera.commands import export
from tessera.deploy.exporting import verify as verification
from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.exporting.job import ExportJob
from tessera.deploy.exporting.verify import Accuracy, verify
from tessera.utils.checkpoints.format import load_any_checkpoint, save_checkpoint
from tessera.utils.errors import UserError
from tessera.utils.machine.optional_packages import import_extra
from tessera.utils.ranks.world import World
from tests.deploy.exporting.made import FREE, checkpoint, dataset

IMGSZ = 96


@pytest.fixture(scope="module")
def job(made_pt: Path) -> ExportJob:
    return ExportJob.read(ExportConfig(weights=str(made_pt), imgsz=[IMGSZ]))


def with_flags(job: ExportJob, **flags: Any) -> ExportJob:
    return dataclasses.replace(job, config=dataclasses.replace(job.config, **flags))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset(tmp_path_factory.mktemp("data"))


def test_a_half_file_whose_numbers_overflow_is_a_row_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float32 the same weights find what they should."""
    path = checkpoint(tmp_path / "best.pt", FREE)
    state = load_any_checkpoint(path)
    state["ema"]["model.0.bn.weight"] *= 1e6
    state["ema"]["model.1.conv.weight"] *= 1e-6
    save_checkpoint(path, state)
    with pytest.raises(UserError, match=r"best-raw-half-64x64\.onnx.*not finite.*without --half"):
        export.run(weights=str(path), include=["onnx"], raw=True, half=True, imgsz=64, device="cpu")
    assert "best-raw-half-64x64.onnx" in capsys.readouterr().out, "the table"


def damaged(path: Path, target: Path, factor: float = 1.05) -> Path:
    """The file with weights of the first convolution that are a little larger."""
    onnx = import_extra("onnx", "export", "a test")
    model = onnx.load(path)
    weights = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 4)
    larger = onnx.numpy_helper.to_array(weights) * np.float32(factor)
    weights.CopyFrom(onnx.numpy_helper.from_array(larger, weights.name))
    onnx.save(model, target)
    return target


def test_on_drawn_images_a_sound_file_passes_and_one_with_other_weights_is_refused(
    job: ExportJob, made_onnx: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"(?s)other\.onnx: .*differ by up to.*Do not use the files") as caught:
        verify(job, {"onnx": made_onnx, "other": damaged(made_onnx, tmp_path / "other.onnx")}, World(), None)
    assert caught.value.exit_code == 1 and "best.onnx" not in str(caught.value)
    first, _, network, sound, other = capsys.readouterr().out.splitlines()
    assert "synthetic shapes" in first
    assert [line.split()[0] for line in (network, sound, other)] == ["best.pt", "best.onnx", "other.onnx"]
    assert sound.split()[-2:] == ["100.0%", "float32"]


def test_map_and_what_is_lost_are_in_the_table_and_a_file_that_loses_too_much_is_refused(
    job: ExportJob, made_onnx: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index, _ = with_flags(job, data=str(data)).images("val")
    verify(job, {"onnx": made_onnx}, World(), index)
    first, _, network, file = capsys.readouterr().out.splitlines()
    assert "6 images of val and 7 crops" in first
    assert network.count(" to ") == 1 and file.count(" to ") == 2, "its interval, and that of what it lost"
    lost = Accuracy(0.5, (0.4, 0.6), 0.02, (0.01, 0.03))
    monkeypatch.setattr(verification, "accuracy", lambda *_: lost)
    verify(with_flags(job, max_drop=0.03), {"onnx": made_onnx}, World(), index)
    with pytest.raises(UserError, match=r"loses 0\.0200 mAP50-95, expected at most 0\.01 .*--max-drop"):
        verify(job, {"onnx": made_onnx}, World(), index)


def test_classes_of_the_data_are_those_of_the_same_names(
    job: ExportJob, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    described, other = yaml.safe_load(data.read_text()), tmp_path / "other.yaml"

    def with_keys(**keys: Any) -> ExportJob:
        other.write_text(yaml.safe_dump({**described, **keys}))
        return with_flags(job, data=str(other))

    assert with_keys(classes=["star", "square", "circle"]).images("val")[1] == (2, 1, 0)
    assert "3 of 3 classes" in caplog.messages[-1] and caplog.messages[-1].endswith("by name, in another order.")
    assert with_keys(classes=["star", "circle"]).images("val")[1] == (1, -1, 0)
    strange = with_keys(names=["a", "b", "c", "d"])
    message = rf"--weights {job.path} knows 3 classes, but .*other\.yaml has 4, none of them by the same name"
    with pytest.raises(UserError, match=message):
        strange.images("val")
    assert strange.images("train")[0] is not None, "a calibration needs no classes"
    own = dataclasses.replace(with_flags(job, data=""), weights=job.weights._replace(data=str(other)))
    assert own.images("val") == (None, ()) and "none of them by the same name" in caplog.text


def test_two_networks_that_predict_no_number_do_not_agree(
    job: ExportJob, made_onnx: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = copy.deepcopy(job.model)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    broken = damaged(made_onnx, tmp_path / "broken.onnx", np.nan)
    with pytest.raises(UserError, match=r"best\.pt: predicts NaN or infinite numbers for 13 of 13 images"):
        verify(dataclasses.replace(job, model=model), {"onnx": broken}, World(), None)
    said = capsys.readouterr().out
    assert "100.0%" not in said
    assert "broken.onnx: not verified here: neither it nor best.pt detects anything on these images" in said


@pytest.mark.parametrize("lacks", ["the runtime", "the device"])
def test_a_file_that_cannot_be_run_here_is_not_verified_and_said_so(
    job: ExportJob, made_onnx: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lacks: str
) -> None:
    world = World()
    if lacks == "the device":
        monkeypatch.setattr(world.accelerator, "onnx_providers", ("NoSuchExecutionProvider", "CPUExecutionProvider"))
    else:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    verify(job, {"onnx": made_onnx}, world, None)
    reason = "NoSuchExecutionProvider" if lacks == "the device" else "needs the package onnxruntime"
    assert re.search(rf"best\.onnx: not verified here: .*{reason}", capsys.readouterr().out)
