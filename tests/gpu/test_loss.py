"""The loss on a device: the host does not wait, and two runs are equal bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.utils.config import load_hyp
from tests.gpu.conftest import HEADS, Gate, each_head

BATCH, SIZE, NC = 4, 320, 20


def raw_predictions(model: DetectionModel) -> list[Tensor]:
    """As the head gives them, in the memory of a channels-last model, and noise."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(BATCH, 3, SIZE, SIZE, generator=generator).to(memory_format=torch.channels_last)
    with torch.no_grad():
        made = model.train()(images)
    return [p + torch.empty_like(p).normal_(generator=generator) for p in made]


def random_targets(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    centre, half = (torch.rand(count, 2, generator=generator) * side for side in (SIZE, 80))
    image = torch.randint(0, BATCH, (count, 1), generator=generator)
    label = torch.randint(0, NC, (count, 1), generator=generator)
    low, high = ((centre + sign * (half + 2)).clamp(0, SIZE) for sign in (-1, 1))
    return torch.cat((image, label, low, high), 1)


@each_head
def test_it_neither_waits_nor_differs_between_runs(gate: Gate, head: str) -> None:
    torch.manual_seed(0)
    send, cfg = gate.accelerator.send, HEADS[head][1]
    model = DetectionModel(cfg, names=tuple(map(str, range(NC)))).to(memory_format=torch.channels_last)
    criterion = model.head.criterion(load_hyp("hyp.scratch-low.yaml"), imgsz=SIZE)
    host = criterion.assign(random_targets(800), BATCH, (SIZE, SIZE))
    made = raw_predictions(model)
    expected, _ = criterion(made, host)
    predictions = [send(p).requires_grad_() for p in made]
    criterion(predictions, send(host))[0].backward()  # the first call moves the gains
    runs = []
    for _ in range(5):
        with gate.no_waiting():
            loss, _ = criterion(predictions, send(host))
            runs.append((loss.detach(), *torch.autograd.grad(loss, predictions)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
    torch.testing.assert_close(runs[0][0].cpu(), expected, rtol=1e-5, atol=1e-6)
