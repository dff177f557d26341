"""Sizes of `--multi-scale`."""

from __future__ import annotations

from utils.engine.multi_scale import scaled_size


def test_multi_scale_sizes() -> None:
    sizes = [scaled_size(0, epoch, batch, 640, 32) for epoch in range(10) for batch in range(50)]
    assert sizes == [scaled_size(0, epoch, batch, 640, 32) for epoch in range(10) for batch in range(50)]
    assert set(sizes) == set(range(320, 960, 32))  # [0.5, 1.5) · 640
    assert scaled_size(0, 0, 0, 32, 32) == 32
