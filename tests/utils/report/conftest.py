"""Fixtures for charts and trackers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from matplotlib.figure import Figure


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """The figures that were saved."""
    made: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **kwargs: Any) -> None:
        save(figure, *args, **kwargs)
        made.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    yield made


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A small red image."""
    path = tmp_path / "val_batch0_pred.jpg"
    cv2.imwrite(str(path), np.full((20, 30, 3), (0, 0, 255), np.uint8))
    return path
