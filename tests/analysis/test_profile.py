"""Files of `--profile`; nothing is measured without it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from tessera.analysis.profile import SKIPPED_STEPS, STAGES, TRACED_STEPS
from tessera.utils.engine.profile import NoProfile, open_profile
from tessera.utils.ranks.world import World


def test_table_and_trace(tmp_path: Path) -> None:
    with open_profile(True, tmp_path, World()) as profile:
        for epoch in range(2):
            slowly = (number for number in range(SKIPPED_STEPS + TRACED_STEPS + 3) if not time.sleep(0.001))
            for item in profile.waited(slowly):
                with profile.stage("forward"):
                    torch.ones(2).add_(item)
                profile.step()
            profile.epoch(epoch, 1.0)
    table = pd.read_csv(tmp_path / "profile.csv")
    assert list(table) == ["epoch", "seconds", *STAGES, "other"] and table["epoch"].tolist() == [0, 1]
    assert (table["data wait"] >= 0.01).all() and (table["saving"] == 0).all()
    assert table[[*STAGES, "other"]].sum(axis=1).tolist() == pytest.approx([1, 1], abs=1e-3)
    events = json.loads((tmp_path / "profile.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "forward" for event in events) == TRACED_STEPS


def test_off_it_passes_everything_through(tmp_path: Path) -> None:
    items = [1, 2]
    with open_profile(False, tmp_path, World()) as profile, profile.stage("forward"):
        assert type(profile) is NoProfile
        assert profile.waited(items) is items
        profile.step()
        profile.epoch(0, 1.0)
    assert not list(tmp_path.iterdir())
