"""Training samples, stage by stage (`train_sample`); letterbox for validation and inference.

Functions are pure: they draw from the generator they get. Decisions that do not depend on pixels are drawn first, as a
`Scene`, in constant order and number. It is then loaded and rendered into the batch's memory.

Images are uint8 (H, W, 3) RGB; boxes are float32 (n, 4) xyxy in pixels of their image.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tessera.data.augment.geometry import HORIZON, CanvasLabels, Warp, warp_labels
from tessera.data.augment.transforms import OwnTransform, transforms_of
from tessera.utils.config import Hyp
from tessera.utils.machine.opencv import cv2
from tessera.utils.types import FILL, Draw, Sample

MIXUP_BETA = 32.0  # both parameters of the Beta distribution: ratios near one half
MAX_PASTE_COVER = 0.3  # fraction of an existing box that a pasted one may cover
_SUBPIXEL_BITS = 4  # fixed-point fraction of the polygon vertices that OpenCV fills
_STRIP = 80_000  # pixels whose colours change at a time, whose planes stay in the processor's cache

HAS_ALBUMENTATIONS = importlib.util.find_spec("albumentations") is not None
PROBABILITY = 0.01  # of each filter of Albumentations
_BLUR_SIDES = (3, 5, 7)  # pixels
_CLIP_LIMITS = (1.0, 4.0)  # of CLAHE

Placement = tuple[float, float, float, float]
SampleLoader = Callable[[int], Sample]  # image i, long side at the training size; never modified
Images = Sequence[NDArray[np.uint8]]
Corners = Sequence[tuple[int, int]]  # left and top of each image on the canvas, which clips it
Gains = tuple[float, float, float]  # factors of hue, saturation and value
NO_JITTER: Gains = (1.0, 1.0, 1.0)


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
    boxes = sample.boxes_xyxy * np.tile(scale, 2)
    fitted = replace(sample, image=np.asarray(image, np.uint8), boxes_xyxy=boxes, segments=segments)
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
    boxes, classes, weights = warp_labels(labels if pasted is None else labels.joined(pasted), scene.warp)
    return Sample(out, boxes, classes, weights=weights)


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
    outside of it. Objects of an image that does not label all classes are pasted with a region that says so. Draws one
    number per object from `rng`, none if `probability` is 0.

    Returns:
        The mirrored objects, or None if there are none.
    """
    if probability == 0:
        return None
    chosen = rng.random(len(labels.classes)) < probability
    sizes = labels.boxes_xyxy[:, 2:] - labels.boxes_xyxy[:, :2]
    ignored, unlabelled = labels.classes == -1, labels.classes < -1
    around = labels.boxes_xyxy[ignored] + np.array([-1, -1, 1, 1], np.float32)  # the outline of a polygon is pasted too
    chosen &= ~(_cover(labels.boxes_xyxy, around) > 0).any(1)
    candidates = np.flatnonzero(chosen & ~ignored & ~unlabelled & (labels.counts > 0) & (sizes.min(1) > 0))
    if not len(candidates):
        return None
    mirrored = labels.mirrored(candidates, canvas_w)
    free = (_cover(mirrored.boxes_xyxy, labels.boxes_xyxy[~unlabelled]) < MAX_PASTE_COVER).all(1)
    compatible = _cover(mirrored.boxes_xyxy, mirrored.boxes_xyxy) < MAX_PASTE_COVER
    accepted: list[int] = []
    for row in np.flatnonzero(free).tolist():
        if compatible[row, accepted].all():
            accepted.append(row)
    if not accepted:
        return None
    pasted = labels.mirrored(candidates[accepted], canvas_w)
    centres = labels.boxes_xyxy[candidates[accepted]].reshape(-1, 1, 2, 2).mean(2)
    around = labels.boxes_xyxy[unlabelled]
    inside = ((around[:, :2] <= centres) & (centres < around[:, 2:])).all(2)
    rows, regions = np.nonzero(inside)
    at, no_points, no_counts = np.flatnonzero(unlabelled)[regions], np.zeros((0, 2), np.float32), np.zeros_like(rows)
    joined = CanvasLabels(pasted.boxes_xyxy[rows], labels.classes[at], no_points, no_counts, labels.weights[at])
    return pasted.joined(joined)


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
        weights=np.concatenate([sample.all_weights(), other.all_weights()]),
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


def render(
    images: Images,
    corners: Corners,
    warp: Warp,
    out: NDArray[np.uint8],
    gains: Gains = NO_JITTER,
    pasted: CanvasLabels | None = None,
) -> None:
    """Render the visible part of a canvas with images, uint8 (H, W, 3), which do not overlap.

    Without rotation, shear or perspective, each image is resized directly into `out`, which costs a third of a warp.
    Otherwise the visible part is composed by copies and warped once: warping image by image computes each pixel about
    1.5 times. OpenCV's resize maps whole pixels to whole pixels, up to half an image pixel beside the labels.

    Args:
        out: uint8 (*warp.size_hw, 3), overwritten; pixels of a row must be contiguous.
        gains: HSV jitter of the images.
        pasted: labels whose polygons are filled from the mirrored canvas (copy-paste); None for none.
    """
    assert out.shape == (*warp.size_hw, 3), (out.shape, warp.size_hw)
    if pasted is not None or not warp.axis_aligned:
        image, corner = _compose(images, corners, warp, pasted)
        images, corners = [image], [corner]
    if warp.axis_aligned:
        _resize_images(images, corners, warp, out, gains)
    else:
        _warp_image(images[0], corners[0], warp, out)
        jitter_hsv(out, gains)


def _resize_images(images: Images, corners: Corners, warp: Warp, out: NDArray[np.uint8], gains: Gains) -> None:
    height, width = warp.size_hw
    canvas_h, canvas_w = warp.canvas_hw
    (scale_x, _, shift_x), (_, scale_y, shift_y), _ = warp.matrix.tolist()
    # Flips come last. One flip in place at the end costs next to nothing.
    if warp.flip_lr:
        scale_x, shift_x = -scale_x, width - shift_x
    if warp.flip_ud:
        scale_y, shift_y = -scale_y, height - shift_y
    out.fill(jittered_fill(gains))
    for image, (left, top) in zip(images, corners, strict=True):
        across = _visible_part(left, image.shape[1], canvas_w, scale_x, shift_x, width)
        down = _visible_part(top, image.shape[0], canvas_h, scale_y, shift_y, height)
        if across is None or down is None:
            continue
        seen, target = image[down[0], across[0]], out[down[1], across[1]]
        enlarged = target.size > seen.size  # the jitter is applied where there are fewer pixels
        if enlarged:
            seen = seen.copy()
            jitter_hsv(seen, gains)
        cv2.resize(seen, target.shape[1::-1], dst=target, interpolation=cv2.INTER_LINEAR)
        if not enlarged:
            jitter_hsv(target, gains)
    if warp.flip_lr or warp.flip_ud:
        cv2.flip(out, -1 if warp.flip_lr and warp.flip_ud else int(warp.flip_lr), dst=out)


def _visible_part(
    start: int, length: int, canvas: int, scale: float, shift: float, size: int
) -> tuple[slice, slice] | None:
    """Return, along one axis, the visible pixels of an image and the sample's pixels they fill; None if none are."""
    low, high = max(start, 0), min(start + length, canvas)
    target_low, target_high = max(round(low * scale + shift), 0), min(round(high * scale + shift), size)
    if target_low >= target_high:
        return None
    seen_low = min(max(round((target_low - shift) / scale), low), high - 1)
    seen_high = min(max(round((target_high - shift) / scale), seen_low + 1), high)
    return slice(seen_low - start, seen_high - start), slice(target_low, target_high)


def _warp_image(image: NDArray[np.uint8], corner: tuple[int, int], warp: Warp, out: NDArray[np.uint8]) -> None:
    if image.size == 0:
        out.fill(FILL)
        return
    # OpenCV's coordinates are 0, 1, 2 … at pixel centres, half a pixel less than those of the matrix.
    to_canvas = np.array([[1, 0, corner[0] + 0.5], [0, 1, corner[1] + 0.5], [0, 0, 1]])
    to_centres = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])
    matrix = to_centres @ warp.matrix @ to_canvas
    size_wh = warp.size_hw[::-1]
    fill = (FILL, FILL, FILL)
    if warp.projective:
        cv2.warpPerspective(image, matrix, size_wh, dst=out, flags=cv2.INTER_LINEAR, borderValue=fill)
    else:
        cv2.warpAffine(image, matrix[:2], size_wh, dst=out, flags=cv2.INTER_LINEAR, borderValue=fill)


def _compose(
    images: Images, corners: Corners, warp: Warp, pasted: CanvasLabels | None
) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Compose the visible part of the canvas, with pasted objects, as one image; also return its corner."""
    canvas_w = warp.canvas_hw[1]
    left, top, right, bottom = _visible_canvas(warp)
    if pasted is not None:  # pasted objects come from the mirrored position
        left, right = min(left, canvas_w - right), max(right, canvas_w - left)
    canvas = np.full((max(bottom - top, 0), max(right - left, 0), 3), FILL, np.uint8)
    for image, (image_left, image_top) in zip(images, corners, strict=True):
        x0, x1 = max(image_left, left), min(image_left + image.shape[1], right)
        y0, y1 = max(image_top, top), min(image_top + image.shape[0], bottom)
        if x0 < x1 and y0 < y1:
            seen = image[y0 - image_top : y1 - image_top, x0 - image_left : x1 - image_left]
            canvas[y0 - top : y1 - top, x0 - left : x1 - left] = seen
    if pasted is not None and canvas.size:
        mask = np.zeros(canvas.shape[:2], np.uint8)
        # OpenCV fills several polygons by parity, with holes where two overlap: one call each.
        origin, unit = np.array([left, top]) + 0.5, 2**_SUBPIXEL_BITS
        for outline in np.split(pasted.points, np.cumsum(pasted.counts)[:-1]):
            if len(outline):
                cv2.fillPoly(mask, [np.rint((outline - origin) * unit).astype(np.int32)], 255, shift=_SUBPIXEL_BITS)
        cv2.copyTo(cv2.flip(canvas, 1), mask, canvas)
    return canvas, (left, top)


def _visible_canvas(warp: Warp) -> tuple[int, int, int, int]:
    """Return left, top, right, bottom of the visible part of the canvas, with a margin for interpolation."""
    canvas_h, canvas_w = warp.canvas_hw
    height, width = warp.size_hw
    corners = np.array([[0, 0, 1], [width, 0, 1], [width, height, 1], [0, height, 1]], np.float64)
    x, y, depth = np.linalg.inv(warp.matrix) @ corners.T
    if depth.min() < HORIZON:  # the horizon is visible, and with it any part of the canvas
        return 0, 0, canvas_w, canvas_h
    limits = np.array([canvas_w, canvas_h])
    points = np.stack([x, y], 1) / depth[:, None]
    left, top = np.clip(np.floor(points.min(0)) - 2, 0, limits).astype(int).tolist()
    right, bottom = np.clip(np.ceil(points.max(0)) + 2, 0, limits).astype(int).tolist()
    return left, top, right, bottom


def jitter_hsv(image: NDArray[np.uint8], gains: Gains) -> None:
    """Multiply hue (modulo 180: OpenCV's unit is two degrees), saturation and value; rows need not be contiguous."""
    if gains == NO_JITTER:
        return
    hues = (np.rint(np.arange(256) * gains[0]) % 180).astype(np.uint8)
    rows = max(_STRIP // image.shape[1], 1)
    for top in range(0, len(image), rows):
        strip = image[top : top + rows]
        hsv = cv2.cvtColor(strip, cv2.COLOR_RGB2HSV)
        hue, saturation, value = cv2.split(hsv)  # plane by plane is faster than all three channels together
        cv2.LUT(hue, hues, dst=hue)
        cv2.convertScaleAbs(saturation, dst=saturation, alpha=gains[1])
        cv2.convertScaleAbs(value, dst=value, alpha=gains[2])
        cv2.merge((hue, saturation, value), dst=hsv)
        cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=strip)


def jittered_fill(gains: Gains) -> int:
    """Return what the padding grey becomes."""
    return min(round(FILL * gains[2]), 255)


def filter_colours(image: NDArray[np.uint8], rng: np.random.Generator) -> None:
    """Apply Blur, MedianBlur, ToGray and CLAHE of Albumentations, each with probability 0.01.

    The number of draws from `rng` is constant, 0 without the package. Where Albumentations stores its random state
    differs between versions, so that every decision and parameter is drawn here.
    """
    if not HAS_ALBUMENTATIONS:
        return
    applied = rng.random(4) < PROBABILITY
    blur, median = (_BLUR_SIDES[i] for i in rng.integers(len(_BLUR_SIDES), size=2).tolist())
    clip_limit = float(rng.uniform(*_CLIP_LIMITS))
    if not applied.any():
        return
    threads = cv2.getNumThreads()
    import albumentations

    cv2.setNumThreads(threads)  # its import sets OpenCV's threads for the whole process
    makers = (
        lambda: albumentations.Blur(blur_limit=(blur, blur), p=1),
        lambda: albumentations.MedianBlur(blur_limit=(median, median), p=1),
        lambda: albumentations.ToGray(p=1),
        lambda: albumentations.CLAHE(clip_limit=(clip_limit, clip_limit), p=1),
    )
    for make, chosen in zip(makers, applied.tolist(), strict=True):
        if chosen:
            np.copyto(image, make()(image=image)["image"])
