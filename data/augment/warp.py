"""`Warp`: matrix of a given perspective, rotation, zoom, shear, shift and flips, and points mapped by it.

Training images are placed on a canvas (four for mosaic). A `Warp` rotates, zooms, shears, shifts and flips the canvas
into the sample: canvas.py renders the pixels, labels.py maps the labels.

Coordinates are continuous: pixel i covers [i, i + 1), with its centre at i + 0.5. Homogeneous points are rows x, y, 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

HORIZON = 1e-6  # smaller depths lie on or behind the horizon


@dataclass(frozen=True)
class Warp:
    """Map from a canvas to a sample: perspective, rotation and zoom, shear, shift, flips, in this order."""

    canvas_hw: tuple[int, int]
    size_hw: tuple[int, int]  # of the sample
    degrees: float = 0.0  # rotation, clockwise as seen
    zoom: float = 1.0  # factor of lengths
    shear_xy: tuple[float, float] = (0.0, 0.0)  # degrees
    perspective_xy: tuple[float, float] = (0.0, 0.0)  # growth of depth per pixel from the canvas's centre
    shift_xy: tuple[float, float] = (0.5, 0.5)  # the canvas's centre, as a fraction of the sample's width and height
    flip_ud: bool = False
    flip_lr: bool = False

    @cached_property
    def matrix(self) -> NDArray[np.float64]:
        """(3, 3) matrix from homogeneous canvas points to sample points; depth is 1 at the canvas's centre."""
        canvas_h, canvas_w = self.canvas_hw
        height, width = self.size_hw
        angle = math.radians(self.degrees)
        cos, sin = self.zoom * math.cos(angle), self.zoom * math.sin(angle)
        shear_x, shear_y = (math.tan(math.radians(shear)) for shear in self.shear_xy)
        centre = np.array([[1, 0, -canvas_w / 2], [0, 1, -canvas_h / 2], [0, 0, 1]])
        perspective = np.array([[1, 0, 0], [0, 1, 0], [*self.perspective_xy, 1]])
        rotation = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
        shear = np.array([[1, shear_x, 0], [shear_y, 1, 0], [0, 0, 1]])
        shift = np.array([[1, 0, self.shift_xy[0] * width], [0, 1, self.shift_xy[1] * height], [0, 0, 1]])
        mirror = np.eye(3)
        if self.flip_lr:
            mirror[0] = -1, 0, width
        if self.flip_ud:
            mirror[1] = 0, -1, height
        return mirror @ shift @ shear @ rotation @ perspective @ centre

    @property
    def projective(self) -> bool:
        """Whether depth varies."""
        return self.perspective_xy != (0.0, 0.0)

    @property
    def axis_aligned(self) -> bool:
        """Whether pixel rows and columns stay rows and columns, so that a resize suffices."""
        return not self.projective and self.matrix[0, 1] == 0 and self.matrix[1, 0] == 0

    def project(self, points: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Map canvas points (k, 2) to sample points (k, 2); also return whether each is in front of the horizon, (k,).

        Points on or behind the horizon have no image, and become (0, 0).
        """
        mapped = points @ self.matrix[:2, :2].T + self.matrix[:2, 2]
        if not self.projective:
            return mapped, np.ones(len(points), np.bool_)
        depth = points @ self.matrix[2, :2] + self.matrix[2, 2]
        visible = depth > HORIZON
        mapped[~visible] = 0
        return mapped / np.where(visible, depth, 1)[:, None], visible

    def visible_planes(self) -> NDArray[np.float64]:
        """Return planes (9, 3): a homogeneous canvas point is visible if its products with all rows are ≥ 0.

        There are four sides of the canvas, four of the sample, and the horizon. The sample's sides are straight on the
        canvas too, for any perspective.
        """
        canvas_h, canvas_w = self.canvas_hw
        height, width = self.size_hw
        x, y, depth = self.matrix
        horizon = depth - [0, 0, HORIZON]
        canvas_sides = np.array([[1, 0, 0], [-1, 0, canvas_w], [0, 1, 0], [0, -1, canvas_h]])
        return np.vstack([horizon, canvas_sides, x, width * depth - x, y, height * depth - y])
