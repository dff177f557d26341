"""The architectures that YOLOv5 publishes beside its family build, with their exact numbers of parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessera.models.detector import DetectionModel
from tessera.models.summary import count_gflops, count_parameters
from tessera.models.tta import predict_augmented
from tests.models.hub import PUBLISHED, WORDS, describe, parameters


@pytest.mark.parametrize("name", WORDS)
def test_parameters_of_a_published_architecture(name: str) -> None:
    described = describe(name)
    with torch.device("meta"):
        model = DetectionModel({"name": name, **described})
    counted, (known, folded) = count_parameters(model), PUBLISHED.get(name, (None, None))
    assert counted == parameters(described) == (known or counted)
    normalised = sum(m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    plain = counted - normalised  # a bias in place of a normalisation's weight and bias
    assert count_parameters(model.fuse()) == plain == (folded or plain)


@pytest.mark.parametrize("name", ["yolov5s-ghost", "yolov5s-transformer"])
def test_every_parameter_learns(name: str) -> None:
    """At an eighth of the width, in channels-last memory as training has it, and the same once folded."""
    torch.manual_seed(0)
    model = DetectionModel({**describe(name), "width_multiple": 0.0625}, nc=3)
    model.to(memory_format=torch.channels_last)
    x = torch.rand(2, 3, 64, 32).contiguous(memory_format=torch.channels_last)
    sum(level.square().mean() for level in model(x)).backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []
    model.eval()
    with torch.no_grad():
        plain = model(x)[0]
        torch.testing.assert_close(model.fuse()(x)[0], plain, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "strides", "stride"),
    [("yolov5-p34", (8, 16), 32), ("yolov3-tiny", (16, 32), 32), ("yolov5-p2", (4, 8, 16, 32), 32)],
)
def test_images_are_multiples_of_all_maps_and_not_of_those_of_the_head_alone(
    name: str, strides: tuple[int, ...], stride: int
) -> None:
    """The body of yolov5-p34 goes down to stride 32; yolov3-tiny has a map of one row and column more than that."""
    model = DetectionModel({**describe(name), "width_multiple": 0.0625}, nc=3).eval()
    assert model.head.strides == strides and model.stride == stride
    assert count_gflops(model, 64) == pytest.approx(4 * count_gflops(model, 32)) != 0
    found = predict_augmented(model, torch.rand(1, 3, 64, 96))  # sides of its own at 0.83 and 0.67
    assert found.shape[1] > 0 and bool(found.isfinite().all())


def test_a_map_that_the_head_does_not_read_may_be_coarser_than_32() -> None:
    model = DetectionModel({**describe("yolov5-p6"), "width_multiple": 0.0625}, nc=3)
    assert model.stride == 64
    described = {**model.yaml, "head": [*model.yaml["head"][:-1], [[23, 26], 1, "DetectFree", ["nc"]]]}
    del described["anchors"]
    finer = DetectionModel(described)
    assert (finer.head.strides, finer.stride, finer.usable_imgsz(96)) == ((8, 16), 64, 128)
