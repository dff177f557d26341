"""Hyperparameters for the tests of losses."""

from __future__ import annotations

import pytest

from tessera.utils.config import Hyp, load_hyp


@pytest.fixture(scope="module")
def hyp() -> Hyp:
    return load_hyp("hyp.scratch-low.yaml")
