"""Fixtures of the comparisons' tests."""

from __future__ import annotations

import pytest

from tessera.analysis.comparison import differences


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the rounds: what is tested does not take more."""
    monkeypatch.setattr(differences, "PERMUTATIONS", 199)
    monkeypatch.setattr(differences, "ROUNDS", 199)
