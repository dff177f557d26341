"""Tests of 8-bit exports: quantised layers, rounding, sensitivity, and accuracy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional as F

from tessera.commands import export
from tessera.data.labels.coco import COCO_NAMES
from tessera.deploy.exporting import quantisation
from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.exporting.formats import onnx_bytes, write_onnx, write_openvino
from tessera.deploy.exporting.job import ExportJob
from tessera.deploy.exporting.quantisation import (
    fuse_silu,
    layer_effects,
    quantized_nodes,
    round_weights,
    sensitive_layers,
)
from tessera.deploy.exporting.verify import precision_of
from tessera.models.detector import DetectionModel
from tessera.utils.errors import UserError
from tessera.utils.machine.optional_packages import import_extra
from tessera.utils.types import Detections
from tests.deploy.exporting.conftest import open_session
from tests.deploy.exporting.made import (
    ANCHORED,
    FREE,
    NAMES,
    checkpoint,
    dataset,
    differing,
    lively,
    made_image,
    thresholds,
)


def test_which_nodes_are_quantised(made_pt: Path, made_onnx: Path) -> None:
    """Everything from the first convolution to those before the last ones, but SiLU, and nothing else."""
    onnx = import_extra("onnx", "export", "a test")
    weights = ExportJob.read(ExportConfig(weights=str(made_pt))).convolution_weights
    model = onnx.load(made_onnx)
    graph = model.graph
    late = {name for name in weights if not name.startswith(("model.model.0.", "model.model.1.", "model.model.2."))}
    first = next(number for number, node in enumerate(graph.node) if set(node.input) & late)
    between = set(quantized_nodes(graph, late))
    assert between and not between & {node.name for node in graph.node[:first]}, "between layers in float nothing"
    fuse_silu(model, weights)
    onnx.checker.check_model(model)
    inside = set(quantized_nodes(graph, weights))
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    outside = [node for node in convolutions if node.name not in inside]
    assert {name for node in convolutions for name in node.input} >= weights
    assert len(outside) == 2 and all(".4.m." in node.input[1] or ".5.m." in node.input[1] for node in outside), (
        "a level"
    )
    assert not any(name.startswith(("before", "after")) for name in inside), "no resize, no suppression"
    assert {node.op_type for node in graph.node if node.name in inside} == {"Conv", "Clip", "Concat", "Add"}
    activations = [node for node in graph.node if node.op_type == "QuickGelu"]
    assert len(activations) == len(weights)
    made = {output for node in activations for output in node.output}
    assert all(node.input[0] in made for node in outside), "the last convolutions read what bytes became"


def test_openvino_computes_the_operator_of_onnx_runtime(made_pt: Path, made_onnx: Path) -> None:
    onnx, openvino = import_extra("onnx", "export", "a test"), pytest.importorskip("openvino")
    model = onnx.load(made_onnx)
    fuse_silu(model, ExportJob.read(ExportConfig(weights=str(made_pt))).convolution_weights)
    given = {"image": made_image(96, 72), **thresholds(0.375)}
    boxes, scores, classes = map(torch.from_numpy, open_session(model.SerializeToString()).run(None, given))
    network = openvino.Core().read_model(model.SerializeToString())
    answers = openvino.Core().compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(given)
    found = {name: answers[name] for name in ("boxes", "scores", "classes")}
    assert len(boxes) and differing(Detections(boxes, scores, classes), found, 0.375) == 0


def test_a_layer_whose_channels_share_a_wide_range_is_sensitive() -> None:
    """One channel of layer 1 is shifted far beyond the others, and what its readers take of it is nothing."""
    torch.manual_seed(0)
    model = lively(DetectionModel(ANCHORED, names=NAMES)).eval()
    images = [torch.from_numpy(made_image(64, 64, seed))[None].permute(0, 3, 1, 2) / 255 for seed in (1, 2)]
    before = layer_effects(model, images)
    assert set(before) == {0, 1, 2, 3, 4} and all(0 < effect < 1 for effect in before.values())
    with torch.no_grad():
        model.model[1].bn.bias[0] += 1000
        for reader in (model.model[2].cv1, model.model[2].cv2):
            reader.conv.weight[:, 0] = 0
    after = layer_effects(model, images)
    assert after[1] > 3 * before[1] and after[2] > 3 * before[2] and after[3] < 2 * before[3]
    assert set(sensitive_layers(model, images)) >= {0, 1, 2}


@pytest.mark.parametrize("groups", [1, 4])
def test_weights_rounded_together_lose_less_and_lie_on_the_steps_of_a_quantiser(groups: int) -> None:
    generator = torch.manual_seed(0)
    layer = torch.nn.Conv2d(8, 12, 3, groups=groups, bias=False).requires_grad_(requires_grad=False)
    network = torch.nn.Sequential(layer)
    images = [F.avg_pool2d(torch.rand(1, 8, 20, 30, generator=generator), 3, 1) for _ in range(3)]
    exact, given = layer.weight.clone(), [layer(image) for image in images]
    steps = exact.abs().amax((1, 2, 3), keepdim=True) / 127

    def lost() -> float:
        return sum(float((layer(image) - one).square().mean()) for image, one in zip(images, given, strict=True))

    layer.weight.copy_((exact / steps).round() * steps)
    nearest = lost()
    layer.weight.copy_(exact)
    round_weights(network, {"0.weight", "of.no.layer.weight"}, images)
    assert lost() < 0.5 * nearest
    in_steps = layer.weight / steps
    assert (in_steps - in_steps.round()).abs().max() < 1e-3 and torch.equal(
        in_steps.abs().amax((1, 2, 3)).round(), torch.full((12,), 127.0)
    )


def test_where_every_layer_is_sensitive_nothing_is_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(tmp_path, train=2, val=2, size=64)
    weights = checkpoint(tmp_path / "best.pt", ANCHORED, data=str(data))
    job = ExportJob.read(ExportConfig(weights=str(weights), imgsz=[64], int8=True))
    monkeypatch.setattr(quantisation, "MAX_EFFECT", 0.0)
    with pytest.raises(UserError, match=r"--int8: best\.pt .*: 8 bits change the scores too much in every layer"):
        onnx_bytes(job)


@pytest.mark.slow
def test_the_branch_without_nms_is_quantised_too(tmp_path: Path) -> None:
    """Its whole file has no input `iou`. The quantiser derives the steps that the weights were rounded to."""
    weights = checkpoint(tmp_path / "best.pt", FREE, data=str(dataset(tmp_path, train=4, val=2, size=64)))
    job = ExportJob.read(ExportConfig(weights=str(weights), imgsz=[64], int8=True, end2end=True))
    written = tmp_path / "best.onnx"
    write_onnx(job, written)
    assert {value.name for value in open_session(written).get_inputs()} == {"image", "conf", "max_det"}
    assert precision_of(written).startswith("int8")
    onnx = import_extra("onnx", "export", "a test")
    before, after = (
        {value.name: onnx.numpy_helper.to_array(value) for value in onnx.load_from_string(content).graph.initializer}
        for content in (onnx_bytes(job), written.read_bytes())
    )
    weights = job.quantized_weights & set(before)
    assert weights
    for name in weights:
        stored = after[f"{name}_quantized"] * after[f"{name}_scale"][:, None, None, None]
        np.testing.assert_allclose(stored, before[name], rtol=0, atol=1e-5 * np.abs(before[name]).max())


@pytest.mark.slow
def test_a_network_with_focus_is_quantised_in_openvino(tmp_path: Path) -> None:
    for package in ("onnxruntime", "openvino", "nncf"):
        pytest.importorskip(package)
    data = dataset(tmp_path, train=4, val=2, size=64)
    focused = {**ANCHORED, "backbone": [[-1, 1, "Focus", [8, 3]], *ANCHORED["backbone"][1:]]}  # type: ignore[misc]
    weights = checkpoint(tmp_path / "best.pt", focused, data=str(data))
    written = tmp_path / "best.xml"
    write_openvino(ExportJob.read(ExportConfig(weights=str(weights), imgsz=(64,), int8=True)), written)
    assert precision_of(written).startswith("int8")


@pytest.mark.slow
def test_int8_detects_nearly_what_the_checkpoint_detects(shared: Path, tmp_path: Path) -> None:
    for package in ("onnxruntime", "openvino", "nncf"):
        pytest.importorskip(package)
    source, data = tmp_path / "yolov5n.pt", tmp_path / "coco128.yaml"
    source.write_bytes((shared / "weights" / "yolov5n.pt").read_bytes())
    images = sorted((shared / "coco128" / "images" / "train2017").glob("*.jpg"))[:24]
    (tmp_path / "some.txt").write_text("\n".join(map(str, images)))
    content = {"path": str(tmp_path), "train": "some.txt", "val": "some.txt"}
    data.write_text(yaml.safe_dump({**content, "names": list(COCO_NAMES)}))
    flags = {"include": ["onnx", "openvino"], "int8": True, "imgsz": 160, "max_drop": 0.1}
    written = export.run(weights=str(source), data=str(data), device="cpu", **flags)
    assert [path.name for path in written] == ["yolov5n-int8.onnx", "yolov5n-int8.xml"]
    assert all(precision_of(path).startswith("int8 9") for path in written)
    assert written[0].stat().st_size < 0.7 * source.stat().st_size
