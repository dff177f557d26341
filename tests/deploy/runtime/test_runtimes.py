"""Tests of runtimes: a file computes what torch computes, a wrong one is one message, a program is not opened."""

from __future__ import annotations

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.commands import detect, val
from tessera.deploy.inference.detector import Detector
from tessera.deploy.runtime.runtimes import open_exported
from tessera.utils.errors import UserError
from tessera.utils.evaluation.network import Network
from tessera.utils.machine.accelerator import Accelerator, Cuda
from tessera.utils.machine.optional_packages import import_extra
from tests.deploy.runtime.made_files import (
    ANSWER,
    NAMES,
    ROWS,
    STRINGS,
    WHOLE_STRINGS,
    WRITERS,
    Cells,
    attack_files,
    write_answer,
    write_broken_onnx,
    write_onnx,
    write_rows,
    write_torchscript,
)
from tests.system.tiny import make_data

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

CPU = Accelerator()
NEEDED = {".onnx": "onnxruntime", ".xml": "openvino"}


def made(folder: Path, suffix: str, strings: dict[str, str] = STRINGS) -> Path:
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
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(image).save(tmp_path / "image.png")
    data = make_data(tmp_path, train=1, val=1)
    path = write_torchscript(tmp_path / "a.torchscript", {**STRINGS, "size_hw": "[64, 64]"})
    (result,) = Detector(path, trust_file=True, conf_thres=0.01, device="cpu")(image)
    assert result.names == NAMES and 0.4 < result.scores.max() < 0.6  # the mean of a colour
    found = detect.run(
        weights=str(path), trust_file=True, source=[str(tmp_path / "image.png")], nosave=True, device="cpu"
    )
    assert found.images == 1 and found.detections > 0
    with pytest.raises(UserError, match="knows 3 classes"):  # opened and described
        val.run(weights=str(path), trust_file=True, data=str(data), project=str(tmp_path / "val"), device="cpu")


IMAGE = np.zeros((64, 64, 3), np.uint8)
NAN, DEEP = float("nan"), "[" * 100_000


def found(path: Path) -> Any:
    (result,) = Detector(path, conf_thres=0.1, device="cpu")(IMAGE)
    return result


def test_sound_outputs_are_the_detections(tmp_path: Path) -> None:
    result = found(write_answer(tmp_path / "a.onnx", ANSWER))
    np.testing.assert_array_equal(result.boxes_xyxy, ANSWER["boxes"])
    np.testing.assert_array_equal(result.scores, ANSWER["scores"])
    np.testing.assert_array_equal(result.classes, ANSWER["classes"])
    assert found(write_rows(tmp_path / "b.onnx", ROWS)).classes.tolist() == [2, 0, 1]
    nothing = {name: value[:0] for name, value in ANSWER.items()}
    assert len(found(write_answer(tmp_path / "c.onnx", nothing)).scores) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"classes": np.array([-3, 0])}, "the class -3, expected 0 to 2"),
        ({"classes": np.array([0, 999])}, "the class 999, expected 0 to 2"),
        ({"classes": np.array([0.5, 1], np.float32)}, "the class 0.5, expected 0 to 2"),
        ({"boxes": np.ones((2, 5), np.float32)}, r"shapes \(2, 5\), \(2\), \(2\), expected"),
        ({"boxes": np.full((2, 4), NAN, np.float32)}, "boxes with numbers that are not finite"),
        ({"boxes": np.array([[0, 0, 1e9, 9]] * 2, np.float32)}, "a box outside the image of 64 × 64"),
        ({"boxes": np.array([[9, 9, 1, 1]] * 2, np.float32)}, "a box outside the image of 64 × 64"),
        ({"scores": np.array([NAN, 0.5], np.float32)}, "scores with numbers that are not finite"),
        ({"scores": np.array([5, 0.5], np.float32)}, "scores from 0.5 to 5, expected 0 to 1"),
        ({"scores": np.array(["high", "low"])}, "scores of .*, expected numbers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_outputs_of_a_detector(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = write_answer(tmp_path / "best.onnx", {**ANSWER, **change})
    with pytest.raises(UserError, match=rf"best\.onnx: .*it computes .*{said}.* export it without"):
        found(path)


def test_more_boxes_than_were_asked_for(tmp_path: Path) -> None:
    path = write_answer(tmp_path / "best.onnx", {name: value.repeat(20, 0) for name, value in ANSWER.items()})
    (result,) = Detector(path, device="cpu")(IMAGE)
    assert len(result.scores) == 40
    with pytest.raises(UserError, match="it computes 40 boxes, expected 39 at most"):
        list(Detector(path, max_det=39, device="cpu")(IMAGE))


def test_an_output_that_is_missing_and_a_batch_that_no_network_has(tmp_path: Path) -> None:
    path = write_answer(tmp_path / "best.onnx", {name: ANSWER[name] for name in ("boxes", "scores")})
    with pytest.raises(UserError, match=r"best\.onnx: ONNX Runtime.* does not compute it \(.*classes.*\)\. Export"):
        found(path)
    for batch in (0, 10**9):
        with pytest.raises(UserError, match=r"best\.onnx: "):
            found(write_rows(tmp_path / "best.onnx", ROWS, batch=batch))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ROWS[:, :, :6], r"rows of the shape \(1, 2, 6\), expected \(1, any, 7\)"),
        (ROWS[0], r"rows of the shape \(2, 7\), expected"),
        (ROWS.repeat(3, 0), r"rows of the shape \(3, 2, 7\), expected"),
        (ROWS * NAN, "rows with numbers that are not finite"),
        (ROWS + np.float32("inf"), "rows with numbers that are not finite"),
        (ROWS > 0, "rows of bool, expected numbers"),
    ],
    ids=["columns", "sides", "images", "NaN", "infinite", "flags"],
)
def test_impossible_outputs_of_a_bare_network(tmp_path: Path, rows: Any, said: str) -> None:
    with pytest.raises(UserError, match=rf"best\.onnx: .*it computes {said}"):
        found(write_rows(tmp_path / "best.onnx", rows))


@pytest.mark.parametrize(
    "change",
    [
        {"names": '["red", "green"]'},  # two of three
        {"names": '[["red"], "green", "blue"]'},
        {"names": json.dumps(["x" * 10_000, "green", "blue"])},
        {"names": DEEP},
        {"names": "null"},
        {"names": "[]"},
        {"imgsz": "1000000000"},
        {"imgsz": "x" * 100_000},
        {"imgsz": "70"},
        {"stride": "7"},
        {"stride": "0"},
        {"stride": "4096", "imgsz": "4096"},
        {"size_hw": "[64, 63]"},
        {"size_hw": "[1e999, 64]"},
        {"conf": "NaN"},
        {"conf": "[0.5]"},
        {"conf_per_class": "[0.5, NaN, 0.5]"},
        {"pixels": '{"range": [1, NaN]}'},
    ],
    ids=lambda change: "-".join(f"{key} {value[:20]}" for key, value in change.items()),
)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "bare"])
def test_a_description_that_is_none(tmp_path: Path, change: dict[str, str], whole: bool) -> None:
    if whole:
        path = write_answer(tmp_path / "best.onnx", ANSWER, {**WHOLE_STRINGS, **change})
    else:
        path = write_rows(tmp_path / "best.onnx", ROWS, {**STRINGS, **change})
    with pytest.raises(UserError, match=r"best\.onnx: (its metadata is damaged|damaged, or no sound export)") as caught:
        found(path)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
