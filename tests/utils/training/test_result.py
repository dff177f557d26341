"""Result of a training, recalled after a restart."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from tessera.utils.ranks.world import World
from tessera.utils.training.resume_target import TrainingResult, recall_result, remember_result
from tests.utils.checkpoints.made_saver import METRICS

ARRAYS = ("class_ids", "per_class", "images_per_class", "objects_per_class", "class_confidences")
MEASURED = dataclasses.replace(
    METRICS,
    precision=0.1 + 0.2,
    map50=1 / 3,
    class_ids=np.array([1]),
    per_class=np.array([[0.3, 0.5, 1 / 3, 0.25]]),
    losses=(0.5, float("nan")),
    speed_ms=(1.0, 2.0, 0.1),
    names=("cat", "dög"),
)


def test_the_result_of_a_training_is_recalled() -> None:
    kept: dict[str, str] = {}

    class Kept(World):
        def remember(self, key: str, value: str) -> None:
            kept[key] = value

        def recall(self, key: str) -> str | None:
            return kept.get(key)

    assert recall_result(Kept()) is None
    remember_result(TrainingResult(), Kept())
    assert recall_result(Kept()) == TrainingResult(), "a search in which nothing was left to do"
    for metrics in (MEASURED, dataclasses.replace(MEASURED, **{key: getattr(MEASURED, key)[:0] for key in ARRAYS})):
        ended = TrainingResult(metrics, Path("runs/exp"), "shapes.yaml", 3, 2, False)
        remember_result(ended, Kept())
        found = recall_result(Kept())
        assert found is not None and dataclasses.replace(found, metrics=metrics) == ended
        recalled = found.metrics
        assert recalled is not None and str(recalled) == str(metrics) and recalled.fitness == metrics.fitness
        for field in dataclasses.fields(metrics):
            was, now = getattr(metrics, field.name), getattr(recalled, field.name)
            assert type(was) is type(now)
            np.testing.assert_array_equal(was, now, strict=isinstance(was, np.ndarray))
