"""Size and cost of the models."""

from __future__ import annotations

import pytest
import torch

from tessera.models.detector import DetectionModel
from tessera.models.summary import count_gflops, summary


@pytest.mark.parametrize(("size", "gflops"), [("n", 4.5), ("s", 16.5), ("m", 49.0), ("l", 109.1), ("x", 205.7)])
def test_published_gflops(size: str, gflops: float) -> None:
    with torch.device("meta"):
        model = DetectionModel(f"yolov5{size}")
    assert count_gflops(model, 640) == pytest.approx(gflops, abs=0.051)
    assert count_gflops(model, 1280) == pytest.approx(4 * count_gflops(model, 640))


def test_summary_line_and_that_the_model_stays_as_it_was() -> None:
    model = DetectionModel("yolov5n")
    model.model[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert summary(model) == "yolov5n: 214 layers, 1,872,157 parameters, 4.5 GFLOPs"
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert summary(model.fuse()).startswith("yolov5n: 157 layers, 1,867,405 parameters")
