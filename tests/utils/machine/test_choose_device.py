"""Choice of a rank's device, on a machine with synthetic CUDA devices."""

from __future__ import annotations

import pytest
import torch

from tessera.utils.environment import Launch
from tessera.utils.errors import ConfigError
from tessera.utils.machine.accelerator import accelerator_of, choose_accelerator


def show(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)


def rank(local: int) -> Launch:
    return Launch(rank=local, local_rank=local, size=8, launcher="slurm")


@pytest.mark.parametrize(
    ("visible", "flag", "local_rank", "index"),
    [(8, "", 3, 3), (8, "6,7", 1, 7), (1, "", 3, 0), (1, "0", 7, 0), (1, "cuda", 0, 0)],
)
def test_a_rank_takes_the_device_of_its_place_or_the_only_one_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: int, flag: str, local_rank: int, index: int
) -> None:
    show(monkeypatch, visible)
    assert choose_accelerator(flag, rank(local_rank)).device == torch.device("cuda", index)


def test_more_ranks_than_devices_are_refused_by_the_rank_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, 2)
    with pytest.raises(ConfigError, match="local rank 5 has no device: this node has 2 devices") as caught:
        choose_accelerator("", rank(5))
    assert caught.value.reporter == 5


def test_the_accelerator_of_a_device() -> None:
    assert [accelerator_of(torch.device(kind)).kind for kind in ("cpu", "cuda", "mps")] == ["cpu", "cuda", "mps"]
