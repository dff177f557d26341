"""The architectures that YOLOv5 publishes beside its family build, with their exact numbers of parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.detector import DetectionModel
from models.summary import count_parameters
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
