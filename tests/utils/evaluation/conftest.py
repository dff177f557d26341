"""What several tests of evaluation measure."""

from __future__ import annotations

import pytest
import torch

from tessera.data.feed.loader import ValLoader
from tessera.models.detector import DetectionModel
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.runtime.checkpoint import fused_copy


@pytest.fixture(scope="module")
def model(loader: ValLoader) -> DetectionModel:
    """Untrained, with scores of every size, so that there is something to count and to match."""
    torch.manual_seed(0)
    model = fused_copy(DetectionModel("yolov5n.yaml", names=loader.index.names), Accelerator())
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter)
    return model
