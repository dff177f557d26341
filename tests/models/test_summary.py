"""Model summary."""

from __future__ import annotations

import torch

from tessera.models.detector import DetectionModel
from tessera.models.summary import summary


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
