"""What Weights & Biases gets, and in which row of its history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tessera.utils.report.trackers.loggers import Loggers
from tests.utils.report.fake_trackers import CONFIG, install, use


def test_wandb(tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "wandb")
    use(["wandb"], tmp_path, picture)
    ((_, init),) = fake.named("wandb.init")
    assert (init["project"], init["name"], init["config"], init["id"]) == ("tessera", tmp_path.name, CONFIG, None)
    logged = fake.named("wandb.init().log")
    assert logged[0] == (({"train/box_loss": 0.5},), {"step": 2})
    assert list(logged[1][0][0]) == ["val_batch0_pred"] and logged[1][1] == {"commit": False}
    assert fake.named("wandb.Image") == [((str(picture),), {"caption": "epoch 2"})]
    assert fake.named("wandb.Artifact().add_file") == [((str(tmp_path / "best.pt"),), {})]
    assert len(fake.named("wandb.init().log_artifact")) == len(fake.named("wandb.init().finish")) == 1
    use(["wandb"], tmp_path, picture, resume=True)
    assert fake.named("wandb.init")[1][1]["id"] == "id-1"


class Rows:
    """The history of a W&B run: rows whose steps only grow; what is logged for an earlier step is dropped."""

    def __init__(self) -> None:
        self.id, self.rows, self._step = "id-1", dict[int, set[str]](), 0

    def log(self, values: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if step is not None and step < self._step:
            return
        self._step = self._step if step is None else step
        self.rows.setdefault(self._step, set()).update(values)
        self._step += commit is not False if step is None else commit is True

    def log_artifact(self, *_: Any, **__: Any) -> None:
        """Kept."""

    def finish(self) -> None:
        """Sent."""


def test_wandb_keeps_the_last_pictures_which_are_of_an_earlier_epoch(
    tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = Rows()
    install(monkeypatch, "wandb", init=lambda **_: history)
    with Loggers(["wandb"], tmp_path, CONFIG) as log:
        for tag in ("labels", "train_batch0"):
            log.image(tag, picture, 0)
        for epoch in range(3):
            log.scalars({"loss": 0.5}, epoch)
        log.image("predictions", picture, 2)
        for tag in ("F1_curve", "results"):
            log.image(tag, picture, 1)  # the best epoch, once all are done
    assert history.rows == {
        0: {"labels", "train_batch0", "loss"},
        1: {"loss"},
        2: {"loss", "predictions", "F1_curve", "results"},
    }
