"""Test-time augmentation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.models.detector import VIEWS, DetectionModel, predict_augmented


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
