"""What Kubernetes gives two pods, on two hosts: Kubeflow's variables, the same bare command, and starts again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.hosts import two_hosts
from tests.system.launch import ROOT, run_python
from tests.system.pods import TRAIN, begun, campaign
from tests.system.tiny import flags, losses

pytestmark = pytest.mark.slow


def test_pods_that_are_ended_and_recreated_end_with_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        undisturbed = begun(hosts, tmp_path)
        assert "2 ranks (1 on tess-" in undisturbed.pods[0].outcome.err, undisturbed.said()
        strikes = campaign(hosts, tmp_path, 2, 4, undisturbed)
    assert strikes.equal == strikes.runs >= 1 and sum(strikes.kinds.values()) == 2
    alone = run_python(ROOT / "train.py", *flags(tmp_path / "tiny.yaml", tmp_path / "alone", *TRAIN), timeout=240)
    assert alone.code == 0, alone.said
    ratio = losses(undisturbed.run).to_numpy() / losses(tmp_path / "alone" / "exp").to_numpy()
    assert abs(ratio - 1).max() < 0.01
