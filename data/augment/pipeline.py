"""Training samples, stage by stage (`train_sample`); letterbox for validation and inference.

Functions are pure: they draw from the generator they get. Decisions that do not depend on pixels are drawn first, as a
`Scene`, in constant order and number. It is then loaded and rendered into the batch's memory.

Images are uint8 (H, W, 3) RGB; boxes are float32 (n, 4) xyxy in pixels of their image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tessera.data.augment.canvas import render
from tessera.data.augment.colours import NO_JITTER, Gains, filter_colours, jitter_hsv
from tessera.data.augment.geometry import CanvasLabels, Warp, warp_labels
from tessera.data.augment.transforms import OwnTransform, transforms_of
from tessera.utils.config import Hyp
from tessera.utils.machine.opencv import cv2
from tessera.utils.types import FILL, Draw, Sample

MIXUP_BETA = 32.0  # both parameters of the Beta distribution: ratios near one half
MAX_PASTE_COVER = 0.3  # fraction of an existing box that a pasted one may cover

Placement = tuple[float, float, float, float]
SampleLoader = Callable[[int], Sample]  # image i, long side at the training size; never modified


def letterbox(
    sample: Sample, size_hw: tuple[int, int], out: NDArray[np.uint8] | None = None
) -> tuple[Sample, Placement]:
    """Centre an image on grey of `size_hw`; a larger image is shrunk first, with its aspect ratio.

    The second value is the placement scale_x, scale_y, left, top: x = x_before · scale_x + left. `out`, uint8
    (*size_hw, 3), is overwritten and returned as the image; None = a new array.
    """
    height, width = size_hw
    out = np.empty((height, width, 3), np.uint8) if out is None else out
    assert out.shape == (height, width, 3), (out.shape, size_hw)
    sample, scale_x, scale_y = _shrink_to_fit(sample, size_hw)
    left, top = _centred(sample, size_hw)
    bottom, right = top + sample.image.shape[0], left + sample.image.shape[1]
    out[:top], out[bottom:] = FILL, FILL
    out[top:bottom, :left], out[top:bottom, right:] = FILL, FILL
    out[top:bottom, left:right] = sample.image
    offset = np.array([left, top], np.float32)
    moved = Sample(
        out, sample.boxes_xyxy + np.tile(offset, 2), sample.classes, [points + offset for points in sample.segments]
    )
    return moved, (scale_x, scale_y, float(left), float(top))


def _shrink_to_fit(sample: Sample, size_hw: tuple[int, int]) -> tuple[Sample, float, float]:
    """Shrink a sample to fit into `size_hw`, if necessary; also return the scales of x and y."""
    image_h, image_w = sample.image.shape[:2]
    ratio = min(size_hw[0] / image_h, size_hw[1] / image_w)
    if ratio >= 1:
        return sample, 1.0, 1.0
    size_wh = max(round(image_w * ratio), 1), max(round(image_h * ratio), 1)
    scale = np.array([size_wh[0] / image_w, size_wh[1] / image_h], np.float32)
    image = cv2.resize(sample.image, size_wh, interpolation=cv2.INTER_AREA)
    segments = [points * scale for points in sample.segments]
    fitted = Sample(np.asarray(image, np.uint8), sample.boxes_xyxy * np.tile(scale, 2), sample.classes, segments)
    return fitted, float(scale[0]), float(scale[1])


def _centred(sample: Sample, size_hw: tuple[int, int]) -> tuple[int, int]:
    """Return left and top of an image centred in `size_hw`; an odd pixel goes right or below."""
    return (size_hw[1] - sample.image.shape[1]) // 2, (size_hw[0] - sample.image.shape[0]) // 2


@dataclass(frozen=True)
class Scene:
    """The images of a sample and their arrangement, drawn before any image is loaded."""

    # One image, centred on a canvas of the sample's size; or four on a canvas twice that size: top left, top right,
    # bottom left, bottom right.
    indices: tuple[int, ...]
    centre_xy: tuple[int, int]  # where the four meet, in canvas pixels
    warp: Warp  # canvas to sample


def draw_partners(index: int, mosaic_candidates: Iterable[int], count: int, rng: np.random.Generator) -> list[int]:
    """Draw `count` other neighbours as partners of image `index`, all different if there are enough."""
    others = [neighbour for neighbour in mosaic_candidates if neighbour != index] or [index]
    return [others[i] for i in np.resize(rng.permutation(len(others)), count).tolist()]


def draw_warp(canvas_hw: tuple[int, int], size_hw: tuple[int, int], hyp: Hyp, rng: np.random.Generator) -> Warp:
    """Draw a random warp within the hyperparameters' ranges; always ten numbers from `rng`."""
    u = rng.uniform(-1, 1, 8).tolist()
    flips = rng.random(2).tolist()
    return Warp(
        canvas_hw,
        size_hw,
        degrees=u[0] * hyp.degrees,
        zoom=1 + u[1] * hyp.scale,
        shear_xy=(u[2] * hyp.shear, u[3] * hyp.shear),
        perspective_xy=(u[4] * hyp.perspective, u[5] * hyp.perspective),
        shift_xy=(0.5 + u[6] * hyp.translate, 0.5 + u[7] * hyp.translate),
        flip_ud=flips[0] < hyp.flipud,
        flip_lr=flips[1] < hyp.fliplr,
    )


def draw_mosaic(
    index: int, mosaic_candidates: Iterable[int], size_hw: tuple[int, int], hyp: Hyp, rng: np.random.Generator
) -> Scene:
    """Draw a mosaic of image `index` and three neighbours, around a centre in the middle half of the canvas."""
    height, width = size_hw
    indices = rng.permutation([index, *draw_partners(index, mosaic_candidates, 3, rng)]).tolist()
    centre_x, centre_y = rng.uniform(0.5, 1.5, 2) * (width, height)
    canvas_hw = 2 * height, 2 * width
    return Scene(tuple(indices), (int(centre_x), int(centre_y)), draw_warp(canvas_hw, size_hw, hyp, rng))


def draw_letterboxed(index: int, size_hw: tuple[int, int], hyp: Hyp, rng: np.random.Generator) -> Scene:
    """Draw the warp of image `index` alone, in the centre of the canvas."""
    height, width = size_hw
    return Scene((index,), (width // 2, height // 2), draw_warp(size_hw, size_hw, hyp, rng))


def render_scene(
    scene: Scene,
    load: SampleLoader,
    copy_paste: float,
    rng: np.random.Generator,
    out: NDArray[np.uint8],
    gains: Gains = NO_JITTER,
) -> Sample:
    """Load a scene's images and render it into `out`, uint8 (*size_hw, 3).

    Copy-paste, with probability `copy_paste` per object, works on the canvas, where the images are whole. It alone
    draws from `rng`, one number per object.
    """
    samples = [load(index) for index in scene.indices]
    if len(samples) == 1:
        samples = [_shrink_to_fit(samples[0], scene.warp.size_hw)[0]]
    corners = _corners(scene, samples)
    labels = CanvasLabels.gather(samples, corners, scene.warp.canvas_hw)
    pasted = choose_copy_paste(labels, copy_paste, scene.warp.canvas_hw[1], rng)
    render([sample.image for sample in samples], corners, scene.warp, out, gains, pasted)
    boxes, classes = warp_labels(labels if pasted is None else labels.joined(pasted), scene.warp)
    return Sample(out, boxes, classes)


def _corners(scene: Scene, samples: list[Sample]) -> list[tuple[int, int]]:
    """Return left and top of each image on the canvas."""
    if len(samples) == 1:
        return [_centred(samples[0], scene.warp.canvas_hw)]
    x, y = scene.centre_xy
    sizes = [sample.image.shape[:2] for sample in samples]
    return [(x - sizes[0][1], y - sizes[0][0]), (x, y - sizes[1][0]), (x - sizes[2][1], y), (x, y)]


def choose_copy_paste(
    labels: CanvasLabels, probability: float, canvas_w: int, rng: np.random.Generator
) -> CanvasLabels | None:
    """Choose objects with a polygon for copy-paste, mirrored left to right on the canvas (Ghiasi et al., CVPR 2021).

    Each is chosen with `probability`, and pasted if its mirrored box covers less than 0.3 of every existing box,
    including pasted ones. Objects that overlap an ignored region are not pasted, because the copy would show the region
    outside of it. Draws one number per object from `rng`, none if `probability` is 0.

    Returns:
        The mirrored objects, or None if there are none.
    """
    if probability == 0:
        return None
    chosen = rng.random(len(labels.classes)) < probability
    sizes = labels.boxes_xyxy[:, 2:] - labels.boxes_xyxy[:, :2]
    ignored = labels.classes < 0
    around = labels.boxes_xyxy[ignored] + np.array([-1, -1, 1, 1], np.float32)  # the outline of a polygon is pasted too
    chosen &= ~(_cover(labels.boxes_xyxy, around) > 0).any(1)
    candidates = np.flatnonzero(chosen & ~ignored & (labels.counts > 0) & (sizes.min(1) > 0))
    if not len(candidates):
        return None
    mirrored = labels.mirrored(candidates, canvas_w)
    free = (_cover(mirrored.boxes_xyxy, labels.boxes_xyxy) < MAX_PASTE_COVER).all(1)
    compatible = _cover(mirrored.boxes_xyxy, mirrored.boxes_xyxy) < MAX_PASTE_COVER
    accepted: list[int] = []
    for row in np.flatnonzero(free).tolist():
        if compatible[row, accepted].all():
            accepted.append(row)
    return labels.mirrored(candidates[accepted], canvas_w) if accepted else None


def _cover(boxes: NDArray[np.float32], existing: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the fraction of each existing box (m, 4) that each box (n, 4) covers: (n, m)."""
    low = np.maximum(boxes[:, None, :2], existing[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], existing[None, :, 2:])
    area = (existing[:, 2:] - existing[:, :2]).prod(1)
    return np.clip(high - low, 0, None).prod(2) / np.maximum(area, 1e-9)


def mixup(sample: Sample, other: Sample, ratio: float) -> Sample:
    """Apply mixup (Zhang et al., ICLR 2018) to the first image: ratio · sample + (1 − ratio) · other."""
    cv2.addWeighted(sample.image, ratio, other.image, 1 - ratio, 0, dst=sample.image)
    return Sample(
        sample.image,
        np.concatenate([sample.boxes_xyxy, other.boxes_xyxy]),
        np.concatenate([sample.classes, other.classes]),
    )


def draw_hsv_gains(hyp: Hyp, rng: np.random.Generator) -> Gains:
    """Draw gains 1 + U(−1, 1) · range of hue, saturation and value; always three numbers from `rng`."""
    hue, saturation, value = rng.uniform(-1, 1, 3).tolist()
    return 1 + hue * hyp.hsv_h, 1 + saturation * hyp.hsv_s, 1 + value * hyp.hsv_v


def train_sample(
    draw: Draw,
    load: SampleLoader,
    hyp: Hyp,
    rng: np.random.Generator,
    out: NDArray[np.uint8],
    transforms: Sequence[OwnTransform] = (),
    seed: int = 0,
    nc: int = 0,
) -> Sample:
    """Return one augmented training sample, with `out` as its image, boxes inside it, and no polygons.

    The stages are mosaic (with copy-paste, warp and flips, which are rendered together), mixup, hsv, albumentations;
    `own` applies the user's transforms that precede each. Mosaic probability 0 also disables mixup.

    Args:
        rng: the sample's own generator.
        out: uint8 (*draw.size_hw, 3), such as one row of the batch; overwritten.
        transforms: the user's own, whose generators follow from `seed`; of a dataset of `nc` classes.
    """
    own = transforms_of(transforms, seed, draw, nc)
    gains = draw_hsv_gains(hyp, rng)
    is_mosaic = rng.random() < hyp.mosaic
    is_mixup = is_mosaic and rng.random() < hyp.mixup
    # With nothing between the two, the jitter is applied during rendering, where there are fewer pixels.
    is_apart = is_mixup or any(transform.stage in ("mixup", "hsv") for transform in transforms)
    rendered_gains = NO_JITTER if is_apart else gains

    def load_own(index: int) -> Sample:
        return own("mosaic", load(index))

    if not is_mosaic:
        scene = draw_letterboxed(draw.index, draw.size_hw, hyp, rng)
        sample = render_scene(scene, load_own, 0.0, rng, out, rendered_gains)
    else:
        scene = draw_mosaic(draw.index, draw.mosaic_candidates, draw.size_hw, hyp, rng)
        sample = render_scene(scene, load_own, hyp.copy_paste, rng, out, rendered_gains)
    sample = own("mixup", sample)
    if is_mixup:
        (partner,) = draw_partners(draw.index, draw.mosaic_candidates, 1, rng)
        scene = draw_mosaic(partner, draw.mosaic_candidates, draw.size_hw, hyp, rng)
        other = render_scene(scene, load_own, hyp.copy_paste, rng, np.empty_like(out), rendered_gains)
        sample = mixup(sample, own("mixup", other), float(rng.beta(MIXUP_BETA, MIXUP_BETA)))
    sample = own("hsv", sample)
    if is_apart:
        jitter_hsv(out, gains)
    sample = own("albumentations", sample)
    filter_colours(out, rng)  # last, so that no other draw depends on whether the package is installed
    return own("end", sample)
