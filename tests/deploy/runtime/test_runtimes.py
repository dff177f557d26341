"""Tests of runtimes: an exported network computes what torch computes, and a wrong file is one message."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tessera.deploy.runtime.runtimes import open_exported
from tessera.utils.errors import UserError
from tessera.utils.evaluation.network import Network
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.cuda import Cuda
from tessera.utils.machine.optional_packages import import_extra
from tests.deploy.runtime.made_files import NAMES, STRINGS, WRITERS, Cells, write_broken_onnx, write_onnx

CPU = Accelerator()
NEEDED = {".onnx": "onnxruntime", ".xml": "openvino"}


def made(folder: Path, suffix: str, strings: dict[str, str] = STRINGS) -> Path:
    pytest.importorskip("onnx")
    if suffix in NEEDED:
        import_extra(NEEDED[suffix], "export", "a test")
    return WRITERS[suffix](folder / f"best{suffix}", strings)


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_file_computes_what_torch_does_for_any_batch_and_in_threads(tmp_path: Path, suffix: str) -> None:
    opened = open_exported(made(tmp_path, suffix), CPU, trust_file=True)
    assert isinstance(opened, Network)
    assert (opened.names, opened.stride, opened.imgsz, opened.data) == (NAMES, 32, 64, "tiny.yaml")
    batches = [torch.rand(count, 3, 64, 64) for count in (1, 5, 2, 3)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(opened, batches))
    for rows, images in zip(found, batches, strict=True):
        torch.testing.assert_close(rows, Cells()(images), rtol=1e-5, atol=1e-5)


def test_a_file_of_a_fixed_batch_takes_any_number_of_images(tmp_path: Path) -> None:
    opened = open_exported(write_onnx(tmp_path / "best.onnx", batch=2), CPU)
    images = torch.rand(5, 3, 64, 64)
    torch.testing.assert_close(opened(images), Cells()(images), rtol=1e-5, atol=1e-5)  # type: ignore[operator]


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_file_of_another_tool_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(UserError, match=r"best\..*no file of export.py"):
        open_exported(made(tmp_path, suffix, {"names": "{0: 'cat'}", "stride": "32"}), CPU, trust_file=True)


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_damaged_file_is_refused(tmp_path: Path, suffix: str) -> None:
    path = made(tmp_path, suffix)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    with pytest.raises(UserError, match=r"does not load it .*[Ee]xport (it )?again"):
        open_exported(path, CPU, trust_file=True)


@pytest.mark.parametrize("operator", ["Conv", "\x1b[2J"])
def test_names_of_a_file_reach_no_terminal_raw(
    tmp_path: Path, operator: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx")
    import_extra("onnxruntime", "export", "a test")
    with pytest.raises(UserError, match="ONNX Runtime does not load it") as error:
        open_exported(write_broken_onnx(tmp_path / "best.onnx", "\x1b]0;x\x07", operator), CPU)
    assert "\x1b" not in f"{error.value}{capfd.readouterr()}"


def test_what_is_no_openvino_file_is_not_tried_in_other_formats(tmp_path: Path) -> None:
    path = made(tmp_path, ".xml")
    path.write_bytes(bytes(100))
    with pytest.raises(UserError, match=r"best\.xml: found no <net>"):
        open_exported(path, CPU)
    os.truncate(path, 50 << 30)
    with pytest.raises(UserError, match="has 53,687,091,200 bytes, more than the limit of"):
        open_exported(path, CPU)


def test_a_format_of_a_later_version_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found the format 'tessera-network 2', expected one of"):
        open_exported(made(tmp_path, ".onnx", {**STRINGS, "format": "tessera-network 2"}), CPU)


def test_another_size_than_the_file_takes_is_reported(tmp_path: Path) -> None:
    opened = open_exported(made(tmp_path, ".onnx", {**STRINGS, "size_hw": "[64, 64]"}), CPU)
    with pytest.raises(UserError, match=r"found images of \(64, 96\) pixels .*expected \(64, 64\)"):
        opened(torch.zeros(1, 3, 64, 96))  # type: ignore[operator]


SESSION = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])


class Elsewhere(Accelerator):
    """A device that no runtime here computes on."""

    is_host = False
    onnx_providers = ("CUDAExecutionProvider", "CPUExecutionProvider")
    openvino_device = "NPU"


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_a_device_that_is_not_obtained_is_an_error(tmp_path: Path, suffix: str) -> None:
    runtime = import_extra(NEEDED[suffix], "export", "a test")
    if suffix == ".onnx" and "CUDAExecutionProvider" in runtime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(UserError, match=r"requested device.*--device cpu"):
        open_exported(made(tmp_path, suffix), Elsewhere())


def test_onnx_runtime_computes_on_the_gpu_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    library = import_extra("onnxruntime", "export", "a test")
    monkeypatch.setattr(library, "get_available_providers", lambda: [*Cuda.onnx_providers])
    monkeypatch.setattr(library, "InferenceSession", lambda *_, **named: given.update(named) or SESSION)
    with pytest.raises(UserError, match="requested device"):
        open_exported(made(tmp_path, ".onnx"), Cuda(torch.device("cuda", 3)))
    assert given["provider_options"] == [{"device_id": "3", "use_tf32": "0"}, {}] and len(given["providers"]) == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    made(tmp_path, ".onnx")
    with pytest.raises(UserError, match=r"no such file. Did you mean 'best.onnx'"):
        open_exported(tmp_path / "bset.onnx", CPU)


def test_openvino_does_not_load_its_telemetry(tmp_path: Path) -> None:
    before = sys.modules.get("openvino_telemetry")
    open_exported(made(tmp_path, ".xml"), CPU)
    assert sys.modules.get("openvino_telemetry") is before
    from_openvino = sys.modules.get("openvino.tools.ovc.telemetry_utils")
    assert before or from_openvino is None or from_openvino.tm.__name__.endswith("telemetry_stub")
