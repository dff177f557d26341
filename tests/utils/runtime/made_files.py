"""A tiny network in every format whose tools are here, with the metadata of export.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tessera.utils.machine.optional_packages import import_extra
from tessera.utils.runtime.exported import BARE

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


def write_pt2(path: Path, strings: dict[str, str] = STRINGS) -> Path:
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(Cells(), (torch.zeros(2, 3, 64, 64),), dynamic_shapes=shapes)
    torch.export.save(program, path, extra_files={"tessera.json": json.dumps(strings)})
    return path


WRITERS = {".onnx": write_onnx, ".xml": write_openvino, ".torchscript": write_torchscript, ".pt2": write_pt2}
