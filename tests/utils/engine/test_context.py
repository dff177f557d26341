"""RunContext: mosaic epochs from flags and hyperparameters."""

from __future__ import annotations

import dataclasses

import pytest

from tessera.utils.config import load_hyp
from tests.data.made_run import made_run

LOW = load_hyp("hyp.scratch-low.yaml")


@pytest.mark.parametrize(
    ("epochs", "share", "flag", "with_mosaic"),
    [(60, 0.25, -1, 45), (60, 0.25, 10, 50), (60, 0.25, 0, 60), (60, 0, -1, 60), (1, 0.25, -1, 1), (9, 1, -1, 0)],
)
def test_the_mosaic_is_closed_for_a_share_of_the_epochs_or_as_the_flag_says(
    epochs: int, share: float, flag: int, with_mosaic: int
) -> None:
    hyp = dataclasses.replace(LOW, close_mosaic=share)
    run = made_run(hyp, imgsz=64, batch_size=2, epochs=epochs, close_mosaic=flag)
    assert run.mosaic_epochs == with_mosaic
