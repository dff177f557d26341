"""The fault campaign of `make chaos`, with a few kills."""

from __future__ import annotations

import pytest

from tests.system.launch import ROOT, run_python


@pytest.mark.slow
def test_a_few_kills_leave_no_trace() -> None:
    outcome = run_python(ROOT / "tests" / "system" / "chaos.py", "--kills", "3", "--seed", "1", timeout=300)
    assert outcome.code == 0, outcome.said
    assert "with the undisturbed run's bits" in outcome.out
