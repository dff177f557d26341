"""Tests of the export formats: names, unsupported flags, and the small .pt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tessera.commands import export
from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.exporting.formats import Format, chosen
from tessera.deploy.exporting.job import ExportJob
from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.errors import ConfigError, UserError
from tests.deploy.exporting.made import ANCHORED, NAMES, checkpoint

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("weights") / "best.pt", ANCHORED, data="")


def refusal(**flags: object) -> str:
    with pytest.raises(UserError) as caught:
        export.run(device="cpu", **flags)
    return str(caught.value)


def test_names_of_formats() -> None:
    assert [one.name for one in chosen(["pt,onnx", "PT"])] == ["pt", "onnx"]
    with pytest.raises(ConfigError, match=r"no such format\. Did you mean 'onnx'.*Known: onnx, openvino"):
        chosen(["onx"])
    with pytest.raises(ConfigError, match="found nothing"):
        chosen([""])


def test_each_mistake_is_one_message(weights: Path, tmp_path: Path) -> None:
    assert "found a .onnx file, expected the .pt" in refusal(weights="best.onnx")
    assert "no such file" in refusal(weights=str(tmp_path / "missing.pt"))
    assert "the dataset that best.pt was trained on is not known" in refusal(weights=str(weights), int8=True)
    assert "no one-to-one branch" in refusal(weights=str(weights), end2end=True)
    assert "multiples of 16" in refusal(weights=str(weights), raw=True, imgsz=[100, 64])
    assert "the long side" in refusal(weights=str(weights), imgsz=[64, 96])
    assert "a number from 0 to 1" in refusal(weights=str(weights), conf_thres="much")
    assert "pt has no such variant" in refusal(weights=str(weights), include=["pt"], raw=True)
    assert "any batch size" in refusal(weights=str(weights), raw=True, batched=True)
    assert "one precision" in refusal(weights=str(weights), half=True, int8=True)
    assert "no such dataset YAML" in refusal(weights=str(weights), data="no_such")
    assert "no such dataset YAML" in refusal(weights=str(weights), data="no_such", int8=True)
    assert "--max-det" in refusal(weights=str(weights), topk_all=100)
    assert list(weights.parent.glob("*")) == [weights]


def test_a_missing_package_names_its_extra() -> None:
    missing = Format("absent", ".absent", ("int8",), print, "export", quantiser="no_such_package")
    missing.require(ExportConfig())
    wanted = r": needs the package no-such-package.*uv sync --extra export"
    with pytest.raises(UserError, match="--include absent" + wanted):
        dataclasses.replace(missing, packages=("no_such_package",)).require(ExportConfig())
    with pytest.raises(UserError, match="--int8" + wanted):
        missing.require(ExportConfig(int8=True))


def test_files_are_written_beside_the_given_file_and_never_into_the_program(made_pt: Path) -> None:
    assert ExportJob.read(ExportConfig(weights=str(made_pt))).folder == made_pt.parent
    assert ExportJob.read(ExportConfig(weights="tessera-n")).folder == Path()


def test_a_format_that_cannot_be_written_leaves_what_was_there(weights: Path, tmp_path: Path) -> None:
    job = ExportJob.read(ExportConfig(weights=str(weights), output=str(tmp_path)))
    (tmp_path / "best.tflite").mkdir()
    taken = Format("taken", ".tflite", (), lambda _, path: path.write_bytes(b"new") and None)
    with pytest.raises(UserError, match=r"best\.tflite: cannot write the export: .*writable"):
        taken.export(job)
    assert list(tmp_path.iterdir()) == [tmp_path / "best.tflite"]


def test_an_output_that_is_no_folder_is_refused_before_any_work(weights: Path, tmp_path: Path) -> None:
    found = refusal(weights=str(weights), include=["pt"], output=str(tmp_path / "mine.onnx"))
    assert "mine.onnx: found the name of a file, expected a folder" in found
    (tmp_path / "taken").write_text("")
    found = refusal(weights=str(weights), include=["pt"], output=str(tmp_path / "taken"))
    assert "taken: exports cannot be written there (File exists)" in found and "--output" in found
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("half", [False, True])
def test_the_small_pt_is_a_checkpoint(weights: Path, tmp_path: Path, half: bool) -> None:
    content, there = weights.read_bytes(), tmp_path / "new" / "models"
    (path,) = export.run(weights=str(weights), include=["pt"], half=half, output=str(there), device="cpu")
    assert path == there / ("best-half-weights.pt" if half else "best-weights.pt") and list(there.iterdir()) == [path]
    assert list(weights.parent.iterdir()) == [weights] and weights.read_bytes() == content
    before, after = load_weights(weights), load_weights(path)
    assert after.names == NAMES and after.imgsz == before.imgsz == 96
    model = model_of_weights(after, str(path))
    for tensor, original in zip(model.state_dict().values(), before.state_dict.values(), strict=True):
        torch.testing.assert_close(tensor, original, rtol=1e-3 if half else 0, atol=1e-3 if half else 0)
