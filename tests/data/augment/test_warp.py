"""The matrix of each step of a warp."""

from __future__ import annotations

import numpy as np

from tessera.data.augment.warp import Warp


def test_matrix_of_each_step() -> None:
    def centre_and_right(**change):  # type: ignore[no-untyped-def]
        warp = Warp((200, 400), (100, 100), **change)
        points, visible = warp.project(np.array([[200.0, 100.0], [300.0, 100.0], [200.0, 150.0]]))
        assert visible.all()
        return np.round(points, 9).tolist()

    assert centre_and_right() == [[50, 50], [150, 50], [50, 100]]
    assert centre_and_right(zoom=0.5) == [[50, 50], [100, 50], [50, 75]]
    assert centre_and_right(degrees=90) == [[50, 50], [50, 150], [0, 50]]
    assert centre_and_right(shear_xy=(45, 0)) == [[50, 50], [150, 50], [100, 100]]
    assert centre_and_right(shear_xy=(0, 45)) == [[50, 50], [150, 150], [50, 100]]
    assert centre_and_right(shift_xy=(0.25, 1)) == [[25, 100], [125, 100], [25, 150]]
    assert centre_and_right(flip_lr=True) == [[50, 50], [-50, 50], [50, 100]]
    assert centre_and_right(flip_ud=True) == [[50, 50], [150, 50], [50, 0]]
    assert centre_and_right(perspective_xy=(0.01, 0)) == [[50, 50], [100, 50], [50, 100]]
