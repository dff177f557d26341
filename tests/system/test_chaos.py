"""The fault campaign of `make chaos`, with a few strikes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.launch import ROOT, run_python

CHAOS = ROOT / "tests" / "system" / "chaos.py"


@pytest.mark.slow
def test_a_few_strikes_leave_no_trace_and_the_campaign_resumes(tmp_path: Path) -> None:
    for strikes in (2, 4):
        outcome = run_python(CHAOS, "--kills", str(strikes), "--seed", "1", "--folder", str(tmp_path), timeout=300)
        assert f"{strikes // 2 * 2 - 2} strikes done" in outcome.out, outcome.said
    assert outcome.code == 0, outcome.said
    assert "with the undisturbed run's bits" in outcome.out
