"""The loss on a CUDA device: the host does not wait, and two runs are equal bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.detector import DetectionModel
from tests.gpu.conftest import cuda_without_waiting
from utils.config import load_hyp
from utils.machine.cuda import Cuda

BATCH, SIZE, NC = 4, 320, 20


def raw_predictions() -> list[Tensor]:
    """Views of channels-last memory, as a convolution of such a model gives them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, SIZE // stride, SIZE // stride, 3, 5 + NC) for stride in (8, 16, 32)]
    return [torch.randn(shape, generator=generator).permute(0, 3, 1, 2, 4) for shape in shapes]


def random_targets(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    centre, half = (torch.rand(count, 2, generator=generator) * side for side in (SIZE, 80))
    image = torch.randint(0, BATCH, (count, 1), generator=generator)
    label = torch.randint(0, NC, (count, 1), generator=generator)
    low, high = ((centre + sign * (half + 2)).clamp(0, SIZE) for sign in (-1, 1))
    return torch.cat((image, label, low, high), 1)


@pytest.mark.gpu
def test_cuda_neither_waits_nor_differs_between_runs() -> None:
    model = DetectionModel("yolov5n.yaml", names=tuple(map(str, range(NC))))
    criterion = model.head.criterion(load_hyp("hyp.scratch-low.yaml"), imgsz=SIZE)
    host = criterion.assign(random_targets(800), BATCH, (SIZE, SIZE))
    expected, _ = criterion(raw_predictions(), host)
    predictions = [p.cuda().requires_grad_() for p in raw_predictions()]
    criterion(predictions, Cuda().send(host))[0].backward()  # the first call moves the gains
    with cuda_without_waiting():
        runs = []
        for _ in range(5):
            loss, _ = criterion(predictions, Cuda().send(host))
            runs.append((loss.detach(), *torch.autograd.grad(loss, predictions)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
    torch.testing.assert_close(runs[0][0].cpu(), expected, rtol=1e-5, atol=1e-6)
