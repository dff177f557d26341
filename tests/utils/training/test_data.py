"""What a training is told of a dataset that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.utils.config import TrainConfig
from tessera.utils.errors import ConfigError
from tessera.utils.ranks.world import World
from tessera.utils.training.data import read_data


@pytest.mark.parametrize("resume", ["", "runs/train/exp/weights/last.pt"])
def test_a_moved_dataset(tmp_path: Path, resume: str) -> None:
    with pytest.raises(ConfigError, match="no such dataset YAML") as caught:
        read_data(TrainConfig(data=str(tmp_path / "shape.yaml"), resume=resume), World())
    assert "Did you mean" not in str(caught.value), "the repository's datasets are not meant by a path"
    assert ("if that was moved, give --data" in str(caught.value)) == bool(resume)
