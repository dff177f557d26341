"""The detection model: predictions of YOLOv5, decoding, compilation, names, anchors, test-time augmentation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tessera.models.detector import VIEWS, DetectionModel, predict_augmented
from tessera.models.heads.anchor import Detect
from tessera.models.layers.blocks import Conv
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.errors import ConfigError
from tessera.utils.ranks.ddp import smart_DDP


@pytest.fixture
def small() -> DetectionModel:
    """yolov5n with three classes, in training mode."""
    torch.manual_seed(0)
    return DetectionModel("yolov5n.yaml", nc=3)


@pytest.fixture(scope="module")
def official(shared: Path) -> DetectionModel:
    """The official yolov5n, in evaluation mode."""
    checkpoint = load_weights(shared / "weights" / "yolov5n.pt")
    model = DetectionModel(checkpoint.model_yaml, names=checkpoint.names)
    model.load_state_dict({name: tensor.float() for name, tensor in checkpoint.state_dict.items()})
    return model.eval()


def images(batch: int = 2, height: int = 64, width: int = 96) -> Tensor:
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_tensors_of_an_original_checkpoint_fit_by_name_and_shape(shared: Path) -> None:
    original = load_weights(shared / "weights" / "yolov5n.pt").state_dict
    ours = DetectionModel("yolov5n.yaml").state_dict()
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in original.items()}
    # The anchors are in grid units there and here.
    torch.testing.assert_close(ours["model.24.anchors"], original["model.24.anchors"].float())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_predictions_of_the_original(
    official: DetectionModel, shared: Path, fused: bool, memory_format: torch.memory_format
) -> None:
    with np.load(shared / "reference" / "forward.npz") as reference:
        x = torch.from_numpy(reference["images_uint8_rgb_nchw"]).float() / 255
        expected = torch.from_numpy(reference["decoded"])
    model = copy.deepcopy(official).to(memory_format=memory_format)
    if fused:
        model.fuse()
    with torch.no_grad():
        decoded, raw = model(x.contiguous(memory_format=memory_format))
    assert [tuple(level.shape) for level in raw] == [(2, 3, 24, 32, 85), (2, 3, 12, 16, 85), (2, 3, 6, 8, 85)]
    torch.testing.assert_close(decoded[..., :4], expected[..., :4], atol=1e-3, rtol=0)
    torch.testing.assert_close(decoded[..., 4:], expected[..., 4:], atol=1e-5, rtol=0)


def test_raw_outputs_are_views_with_rows_side_by_side(small: DetectionModel) -> None:
    small.to(memory_format=torch.channels_last)
    outputs: list[Tensor] = []
    for conv in small.head.m:
        conv.register_forward_hook(lambda _, __, output: outputs.append(output))
    raw = small(images().contiguous(memory_format=torch.channels_last))
    assert [tuple(level.shape) for level in raw] == [(2, 3, 8, 12, 8), (2, 3, 4, 6, 8), (2, 3, 2, 3, 8)]
    for level, output in zip(raw, outputs, strict=True):
        assert level.data_ptr() == output.data_ptr()
        assert level.stride(-1) == 1


def test_bias_starts_from_priors() -> None:
    torch.manual_seed(0)
    head = Detect(nc=4, anchors=3, channels=[256] * 2, strides=[8, 32])
    for conv, stride in zip(head.m, (8, 32), strict=True):
        bias = conv.bias.view(3, 9)
        # torch's default is uniform within ±1/√fan_in = ±1/16.
        assert (bias[:, :4].abs() <= 1 / 16).all()
        assert ((bias[:, 4] - math.log(8 / (640 / stride) ** 2)).abs() <= 1 / 16).all()
        assert ((bias[:, 5:] - math.log(0.6 / (4 - 0.99999))).abs() <= 1 / 16).all()


def every_kind_of_step() -> DetectionModel:
    """Every kind of step of the forward, in few layers: dynamo takes its time."""
    layers = [[-1, 1, "Conv", [16, 3, 2]], [-1, 1, "C3", [16]], [[-1, 0], 1, "Concat", [1]], [-1, 1, "SPPF", [16]]]
    head = [[[1, 3], 1, "Detect", ["nc", "anchors"]]]
    return DetectionModel({"nc": 2, "anchors": 3, "backbone": layers, "head": head})


def test_compiles_without_a_graph_break() -> None:
    model = every_kind_of_step()
    for training in (True, False):
        model.train(training)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with torch.no_grad():
            torch.testing.assert_close(compiled(images()), model(images()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tessera-n", "tessera-lite0", "yolov5n", "yolov9-t", "yolox-nano"])
def test_each_family_trains_without_a_graph_break(name: str) -> None:
    model = smart_DDP(DetectionModel(name).train())
    model.compile(backend="eager", fullgraph=True)  # as by --compile, but faster
    with torch.autocast("cpu", torch.bfloat16):
        assert all(output.requires_grad for output in model(images()))


def test_compiles_once_for_all_image_sizes() -> None:
    compilations = []

    def compiler(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compilations.append(graph)
        return graph.forward

    model = every_kind_of_step().train()
    model.compile(backend=compiler, dynamic=True)  # as under --multi-scale
    for size in (64, 96, 128, 160, 64, 192):
        sum(output.sum() for output in model(torch.rand(2, 3, size, size))).backward()
    assert len(compilations) == 1


def test_classes_names_and_anchors_can_be_replaced() -> None:
    model = DetectionModel("yolov5n", names={0: "cat", 1: "dog"})
    assert (model.nc, model.names, model.head.no) == (2, ("cat", "dog"), 7)
    assert DetectionModel("yolov5n", nc=2).names == ("0", "1")
    with pytest.raises(ConfigError, match="nc is 3, but there are 2 class names"):
        DetectionModel("yolov5n", nc=3, names=["cat", "dog"])

    pairs = [[[8, 16], [24, 32]], [[32, 32], [48, 64]], [[64, 64], [320, 96]]]
    for anchors in (pairs, [[side for pair in row for side in pair] for row in pairs]):
        model = DetectionModel("yolov5n", anchors=anchors)
        assert model.head.na == 2
        torch.testing.assert_close(
            model.head.anchors * torch.tensor(model.head.strides).view(-1, 1, 1), torch.tensor(pairs).float()
        )
    squares = DetectionModel("yolov5n", anchors=2).head.anchors
    torch.testing.assert_close(squares[:, :, 0], torch.tensor([[4, 4 * math.sqrt(2)]] * 3))
    torch.testing.assert_close(squares[:, :, 0], squares[:, :, 1])
    same = DetectionModel("yolov5n", anchors=3)
    assert same.yaml == DetectionModel("yolov5n").yaml and torch.equal(
        same.head.anchors, DetectionModel("yolov5n").head.anchors
    )


def test_the_description_rebuilds_the_model() -> None:
    model = DetectionModel({**DetectionModel("yolov5s6.yaml").yaml, "ch": 1}, nc=7, anchors=2)
    again = DetectionModel(model.yaml)
    assert (again.name, again.nc, again.channels, again.stride) == ("yolov5s6", 7, 1, 64)
    assert again.yaml == model.yaml
    again.load_state_dict(model.state_dict())


def test_activation_of_the_yaml() -> None:
    model = DetectionModel({**DetectionModel("yolov5n").yaml, "activation": "nn.LeakyReLU(0.1)"})
    activations = [module.act for module in model.modules() if isinstance(module, Conv)]
    assert all(isinstance(act, nn.LeakyReLU) and act.negative_slope == 0.1 for act in activations)


class Lamp(nn.Module):
    """Stands in for a model: finds the brightest pixel, as a box of 10 % of the image as it sees it, once a level."""

    stride = 32

    def __init__(self, *rows: int) -> None:
        super().__init__()
        self.rows = rows

    @property
    def head(self) -> Lamp:
        return self

    def rows_per_level(self, size_hw: torch.Size) -> tuple[int, ...]:
        return self.rows

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        b, _, height, width = images.shape
        assert height % self.stride == 0 and width % self.stride == 0
        flat = images[:, 0].flatten(1).argmax(1)
        box = torch.stack((flat % width + 0.5, flat // width + 0.5, torch.full((b,), 10.0), torch.full((b,), 20.0)), -1)
        row = torch.cat((box, torch.ones(b, 2)), -1)
        return row[:, None].expand(b, sum(self.rows), 6).clone(), []


def test_every_view_points_at_the_same_place() -> None:
    images = torch.zeros(2, 3, 96, 160)
    images[0, :, 20:25, 30:35] = images[1, :, 70:75, 120:125] = 1.0
    predictions = predict_augmented(Lamp(8).eval(), images)  # type: ignore[arg-type]
    assert predictions.shape == (2, 3 * 8, 6)
    for image, (x, y) in enumerate(((32.5, 22.5), (122.5, 72.5))):
        for view, (scale, _) in enumerate(VIEWS):
            box = predictions[image, view * 8, :4]
            assert box[0].item() == pytest.approx(x, abs=3) and box[1].item() == pytest.approx(y, abs=3)
            assert box[2].item() == pytest.approx(10 / scale, rel=0.02)
            assert box[3].item() == pytest.approx(20 / scale, rel=0.02)
    assert (predictions[..., 4:] == 1).all()


def test_the_finest_and_the_coarsest_level_are_omitted_where_they_add_least() -> None:
    predictions = predict_augmented(Lamp(6, 2).eval(), torch.rand(1, 3, 64, 64))  # type: ignore[arg-type]
    assert predictions.shape[1] == 6 + 8 + 2


def test_with_a_real_model() -> None:
    model = DetectionModel("yolov5n", nc=2).eval()
    images = torch.rand(2, 3, 128, 96)
    predictions = predict_augmented(model, images)
    with torch.no_grad():
        plain, raw = model(images)
    first = plain.shape[1] - raw[-1].shape[1:-1].numel()
    torch.testing.assert_close(predictions[:, :first], plain[:, :first])
    assert predictions.dtype == torch.float32 and predictions.shape[2] == 7
