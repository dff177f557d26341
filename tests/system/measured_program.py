"""train.py whose best epoch, the last, is measured once more at the end, and must be found to be the same bits."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

from tessera.commands import train
from tessera.models.detector import DetectionModel
from tessera.utils.evaluation.evaluate import Evaluation, evaluate
from tessera.utils.training.validation import Validation


def measured_last(self: Validation, model: DetectionModel, real: Any = Validation._measured_last) -> Evaluation | None:
    """As the real one, compared with a measurement of the saved weights."""
    found: Evaluation | None = real(self, model)
    assert found is not None
    again = evaluate(self._measurable(model), self._loader, self._run.world)
    np.testing.assert_equal(plain(found), plain(again))
    return found


def plain(found: Evaluation) -> dict[str, Any]:
    """All of it but what a clock has measured."""
    untimed = dataclasses.replace(found.metrics, speed_ms=(0, 0, 0))
    errors = {**vars(found.errors), "confusion": vars(found.errors.confusion)}
    return {
        **vars(found),
        "metrics": vars(untimed),
        "curves": vars(found.curves),
        "ranking": vars(found.ranking),
        "errors": errors,
        "matches": found.matches,
    }


Validation._measured_last = measured_last  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(train.main())
