"""Exported files for tests: a tiny network in several formats, constant ONNX files, and malicious ones."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tessera.deploy.runtime.exported import BARE, WHOLE
from tessera.utils.evaluation.network import ImageDetector, TimedDetections
from tessera.utils.machine.optional_packages import import_extra
from tessera.utils.types import Detections

NAMES, STRIDE = ("red", "green", "blue"), 32
STRINGS = {"format": BARE, "names": json.dumps(NAMES), "imgsz": "64", "stride": str(STRIDE), "data": "tiny.yaml"}


class Cells(nn.Module):
    """A row for each cell of 32 pixels: its middle, 40 × 40 pixels, and the mean of each colour as a score."""

    def forward(self, images: Tensor) -> Tensor:
        scores = nn.functional.avg_pool2d(images, STRIDE).flatten(2).transpose(1, 2)
        height, width = images.shape[2] // STRIDE, images.shape[3] // STRIDE
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centres = (torch.stack((x.flatten(), y.flatten()), -1) + 0.5) * STRIDE
        boxes = torch.cat((centres, torch.full_like(centres, 40.0)), -1)
        return torch.cat((boxes.expand(images.shape[0], -1, -1), scores), -1)


def write_onnx(path: Path, strings: dict[str, str] = STRINGS, batch: int | None = None) -> Path:
    """The same network from ONNX's own operators; for images of 64 × 64 pixels."""
    onnx = import_extra("onnx", "export", "a test")
    boxes = ", ".join(map(str, Cells()(torch.zeros(1, 3, 64, 64))[0, :, :4].flatten().tolist()))
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 18]>
        cells (float[{batch or "batch"}, 3, 64, 64] images) => (float[{batch or "batch"}, 4, 7] predictions)
        <float[1, 4, 4] boxes = {{{boxes}}}, int64[3] flat = {{0, 3, -1}}, int64[2] rows = {{4, 4}}> {{
            cells = AveragePool <kernel_shape = [32, 32], strides = [32, 32]> (images)
            columns = Reshape (cells, flat)
            scores = Transpose <perm = [0, 2, 1]> (columns)
            count = Shape <start = 0, end = 1> (columns)
            shape = Concat <axis = 0> (count, rows)
            all = Expand (boxes, shape)
            predictions = Concat <axis = 2> (all, scores)
        }}"""
    )
    onnx.helper.set_model_props(model, strings)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def write_broken_onnx(path: Path, name: str, operator: str = "Conv") -> Path:
    """A network whose weights, called `name`, lie outside of their file, which ONNX Runtime reports with their name."""
    onnx = import_extra("onnx", "export", "a test")
    given, taken = (onnx.helper.make_tensor_value_info(n, 1, [1, 3, 8, 8]) for n in ("images", "y"))
    outside = onnx.TensorProto(name=name, data_type=1, dims=[3, 3, 1, 1], data_location=1)
    for key, value in (("location", path.name), ("offset", "99999999"), ("length", "36")):
        entry = outside.external_data.add()
        entry.key, entry.value = key, value
    norm = [onnx.numpy_helper.from_array(np.ones(3, np.float32), part) for part in "smbv"]
    nodes = [
        onnx.helper.make_node(operator, ["images", name], ["c"], name=name),
        onnx.helper.make_node("BatchNormalization", ["c", *"smbv"], ["y"]),
    ]
    graph = onnx.helper.make_graph(nodes, "g", [given], [taken], [outside, *norm])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


def write_openvino(path: Path, strings: dict[str, str] = STRINGS) -> Path:
    openvino = import_extra("openvino", "openvino", "a test")
    model: Any = openvino.Core().read_model(write_onnx(path.with_suffix(".onnx")))
    for key, value in strings.items():
        model.set_rt_info(value, ["tessera", key])
    openvino.save_model(model, path, compress_to_fp16=False)
    return path


def write_torchscript(path: Path, strings: dict[str, str] = STRINGS) -> Path:
    traced = torch.jit.trace(Cells(), torch.zeros(2, 3, 64, 64))
    torch.jit.save(traced, path, _extra_files={"tessera.json": json.dumps(strings)})
    return path


WRITERS = {".onnx": write_onnx, ".xml": write_openvino, ".torchscript": write_torchscript}

WHOLE_STRINGS = {**STRINGS, "format": WHOLE}
ANSWER = {  # a sound one
    "boxes": np.array([[1, 2, 30, 40], [5, 5, 20, 60.5]], np.float32),
    "scores": np.array([0.75, 0.5], np.float32),
    "classes": np.array([2, 0], np.int64),
}
ROWS = np.array([[[32, 32, 20, 20, 0.5, 0.25, 0], [30, 30, 9, 9, 0, 0, 0.75]]], np.float32)


def write_answer(path: Path, answer: Mapping[str, NDArray[Any]], strings: Mapping[str, str] = WHOLE_STRINGS) -> Path:
    """A whole detector that detects `answer`, its outputs by name."""
    inputs = "uint8[height, width, 3] image, float conf, float iou, int64 max_det"
    return _write_constants(path, inputs, answer, strings)


def write_rows(path: Path, rows: NDArray[Any], strings: Mapping[str, str] = STRINGS, batch: Any = "batch") -> Path:
    """A bare network that computes `rows` of any images."""
    return _write_constants(path, f"float[{batch}, 3, height, width] images", {"predictions": rows}, strings)


def _write_constants(path: Path, inputs: str, outputs: Mapping[str, NDArray[Any]], strings: Mapping[str, str]) -> Path:
    """A file whose outputs are constants."""
    onnx = import_extra("onnx", "export", "a test")
    constants = [onnx.numpy_helper.from_array(np.asarray(value), f"const_{name}") for name, value in outputs.items()]
    value_of = onnx.helper.make_tensor_value_info
    infos = [value_of(name, one.data_type, None) for name, one in zip(outputs, constants, strict=True)]
    body = " ".join(f"{name} = Identity (const_{name})" for name in outputs)
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> answers ({inputs}) => () {{ {body} }}')
    model.graph.output.extend(infos)
    model.graph.initializer.extend(constants)
    onnx.helper.set_model_props(model, dict(strings))
    onnx.save(model, path)
    return path


def detector_of(
    find: Callable[[NDArray[np.uint8]], Detections], names: tuple[str, ...] = ("box",), imgsz: int = 64, **fields: Any
) -> ImageDetector:
    """A detector of whole images by a function."""
    described = {"source": "a function", "names": names, "imgsz": imgsz, "stride": 32, "describe": str, **fields}
    return ImageDetector(**described, detect=lambda image, rules: TimedDetections(find(image), (0, 0, 0)))


class WritesWhenLoaded(nn.Module):
    """TorchScript that maps a file and writes to it while it is loaded."""

    def __init__(self, trace: str) -> None:
        super().__init__()
        self.trace, self.written = trace, 0

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.trace, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.trace = state[0]
        self.training = state[1]
        mapped = torch.from_file(self.trace, True, 4, dtype=torch.uint8).copy_(torch.ones(4, dtype=torch.uint8))
        self.written = int(mapped.sum())  # else the compiler would leave it out

    def forward(self, images: Tensor) -> Tensor:
        return images


class WritesWhenRun(nn.Module):
    """TorchScript that saves a tensor where it likes."""

    def __init__(self, trace: str) -> None:
        super().__init__()
        self.trace = trace

    def forward(self, images: Tensor) -> Tensor:
        torch.save(images, self.trace)
        return torch.zeros(images.shape[0], 4, 7)


def write_script(path: Path, module: nn.Module, strings: dict[str, str] = STRINGS) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), path, _extra_files={"tessera.json": json.dumps(strings)})
    return path


def attack_files(folder: Path, trace: Path) -> dict[str, Path]:
    """Every attack by its name; each writes to `trace`."""
    return {
        "loaded script": write_script(folder / "loaded.torchscript", WritesWhenLoaded(str(trace))),
        "running script": write_script(folder / "running.torchscript", WritesWhenRun(str(trace))),
    }
