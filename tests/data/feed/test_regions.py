"""Ignored regions in batches: rows of class -1 behind the objects of their image."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.data.feed.dataset import TrainDataset, ValDataset
from tessera.data.feed.image_store import ImageStore
from tessera.utils.config import load_hyp
from tessera.utils.types import Draw
from tests.data.made_index import make_index, write_images

SIZES = [(40, 80), (64, 64)]


@pytest.mark.parametrize("polygons", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_rows_of_class_minus_one(tmp_path: Path, train: bool, polygons: bool) -> None:
    plain = make_index(SIZES, paths=write_images(tmp_path, SIZES), classes=[[1], [2, 0]], polygons=polygons)
    marked = dataclasses.replace(
        plain,
        ignored_offsets=np.array([0, 2, 2]),
        ignored_classes=np.array([-1, 1], np.int32),
        ignored_boxes_xyxy=np.array([[0, 0, 40, 20], [40, 20, 80, 40]], np.float32),
    )
    rows = []
    for index in (plain, marked):
        store = ImageStore(index, 64, "linear")
        hyp = load_hyp("hyp.no-augmentation.yaml")
        dataset = TrainDataset(index, store, hyp, 0, 0) if train else ValDataset(index, store)
        (batch,) = (dataset.__getitems__([Draw(0, 0, 0, (64, 64)), Draw(1, 1, 0, (64, 64))]),)
        rows.append(batch.targets)
    without, found = rows
    ignored = found[:, 1] < 0
    assert torch.equal(found[~ignored], without)
    torch.testing.assert_close(found[ignored], torch.tensor([[0, -1, 0, 16, 32, 32], [0, -1, 32, 32, 64, 48.0]]))
