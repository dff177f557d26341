"""Tests of untrusted programs: without --trust-file nothing of a file is opened."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.commands import detect, val
from tessera.deploy.inference.detector import Detector
from tessera.deploy.runtime.runtimes import open_exported
from tessera.utils.errors import UserError
from tessera.utils.machine.accelerator import Accelerator
from tests.deploy.runtime.attacks import attack_files
from tests.deploy.runtime.made_files import NAMES, ROWS, STRINGS, write_rows, write_torchscript
from tests.system.tiny import make_data

REFUSED = r"a \.torchscript file is a program; .* run anything .*--trust-file .*--include onnx"


@pytest.fixture(scope="module")
def attacks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Path]:
    """Files by what they do, and the file that they leave where it is done."""
    folder = tmp_path_factory.mktemp("attacks")
    return attack_files(folder, folder / "trace"), folder / "trace"


@pytest.mark.parametrize("opener", ["detect", "val", "Detector"])
def test_attacks_leave_no_trace(tmp_path: Path, attacks: tuple[dict[str, Path], Path], opener: str) -> None:
    files, trace = attacks
    for name, path in files.items():
        with pytest.raises(UserError, match=REFUSED):
            if opener == "detect":
                detect.run(weights=str(path), source=[str(tmp_path)], device="cpu")
            elif opener == "val":
                val.run(weights=str(path), data="shapes.yaml", device="cpu")
            else:
                Detector(path, device="cpu")
        assert not trace.exists(), name


def test_what_is_refused_is_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.jit, "load", lambda *a, **k: pytest.fail("opened"))
    (tmp_path / "empty.TorchScript").touch()
    with pytest.raises(UserError, match="is a program"):
        open_exported(tmp_path / "empty.TorchScript", Accelerator())


@pytest.mark.parametrize("name", ["best.pt", "best.pth", "best.onnx", "best.xml", "best.safetensors"])
def test_another_name_does_not_make_a_program_run(
    tmp_path: Path, attacks: tuple[dict[str, Path], Path], name: str
) -> None:
    files, trace = attacks
    (tmp_path / "best.bin").touch()
    for attack, path in files.items():
        shutil.copy(path, tmp_path / name)
        with pytest.raises(UserError, match=rf"best\{Path(name).suffix}"):
            Detector(tmp_path / name, trust_file=True, device="cpu")
        assert not trace.exists(), attack


@pytest.mark.parametrize("place", ["../secret", "{folder}/secret"])
def test_an_onnx_file_reads_nothing_outside_of_its_folder(tmp_path: Path, place: str) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    (tmp_path / "secret").write_bytes(ROWS.tobytes())
    (tmp_path / "inside").mkdir()
    path = write_rows(tmp_path / "inside" / "best.onnx", ROWS)
    model = onnx.load(path)
    (weights,) = model.graph.initializer
    weights.ClearField("raw_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", place.format(folder=tmp_path)), ("length", str(ROWS.nbytes))):
        weights.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=r"best\.onnx: ONNX Runtime does not load it"):
        list(Detector(path, device="cpu")(np.zeros((64, 64, 3), np.uint8)))


def test_a_file_that_is_trusted_is_used(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(picture).save(tmp_path / "picture.png")
    data = make_data(tmp_path, train=1, val=1)
    path = write_torchscript(tmp_path / "a.torchscript", {**STRINGS, "size_hw": "[64, 64]"})
    (result,) = Detector(path, trust_file=True, conf_thres=0.01, device="cpu")(picture)
    assert result.names == NAMES and 0.4 < result.scores.max() < 0.6  # the mean of a colour
    found = detect.run(
        weights=str(path), trust_file=True, source=[str(tmp_path / "picture.png")], nosave=True, device="cpu"
    )
    assert found.images == 1 and found.detections > 0
    with pytest.raises(UserError, match="knows 3 classes"):  # opened and described
        val.run(weights=str(path), trust_file=True, data=str(data), project=str(tmp_path / "val"), device="cpu")
