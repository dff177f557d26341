"""Seeds of samples and processes."""

from __future__ import annotations

import numpy as np
import torch

from tessera.utils.seeding import sample_rng
from tessera.utils.training.setup import init_seeds


def test_a_sample_is_a_function_of_seed_epoch_position_and_stream() -> None:
    same = [sample_rng(1, 2, 3).random(4) for _ in range(2)]
    np.testing.assert_array_equal(*same)
    others = [sample_rng(2, 2, 3), sample_rng(1, 3, 3), sample_rng(1, 2, 4), sample_rng(1, 2, 3, "order")]
    assert len({tuple(rng.random(4)) for rng in others} | {tuple(same[0])}) == 5


def test_process_seeds_differ_by_rank() -> None:
    drawn = []
    for rank in range(2):
        init_seeds(0 + 1 + rank)
        drawn.append((torch.rand(1).item(), np.random.rand()))  # noqa: NPY002
    assert drawn[0] != drawn[1]
