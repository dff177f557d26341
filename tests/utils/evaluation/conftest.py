"""A model and images that several tests evaluate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tessera.data.feed.cache import open_images
from tessera.data.feed.loader import ValLoader, build_val_loader
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.models.detector import DetectionModel
from tessera.utils.evaluation.network import fused_copy
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tests.system.tiny import make_data


@pytest.fixture(scope="package")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValLoader]:
    """Batches of two of eight images of 64 pixels."""
    index = build_index(load_spec(make_data(tmp_path_factory.mktemp("data"), train=1, val=8)), "val")
    with (
        open_images(index, 64, "none", "area", World()) as store,
        build_val_loader(store, World(), batch_size=2, stride=32, workers=1) as loader,
    ):
        yield loader


@pytest.fixture(scope="package")
def model(loader: ValLoader) -> DetectionModel:
    """Untrained, with scores of every size, so that there is something to count and to match."""
    torch.manual_seed(0)
    model = fused_copy(DetectionModel("yolov5n.yaml", names=loader.index.names), Accelerator())
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter)
    return model
