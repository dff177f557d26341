"""Generated dataset of simple shapes, which needs no download.

Six classes on varied textures, from about 15 pixels to 0.6 of the image, rotated, stretched, shaded, overlapping and
clipped by the image, with lines as distractors. Each image is a pure function of (seed, split, number): the files are
equal on all machines with the same NumPy and OpenCV.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tessera.utils.errors import UserError
from tessera.utils.machine.opencv import cv2

NAMES = ("circle", "square", "triangle", "star", "cross", "ring")

_STREAMS = {"train": 0, "val": 1}
_BACKGROUND_FRACTION = 0.05  # of images without an object
_OBJECTS = (4, 15)  # attempted objects an image, the second excluded
_MIN_EXTENT = 14.0  # pixels; long side of the smallest object
_MAX_EXTENT = 0.6  # fraction of the image's long side
_MIN_VISIBLE = 0.75  # fraction of an object's pixels that later objects must leave visible
_MIN_INSIDE = 0.85  # fraction of an object's pixels inside the image
_MIN_OUTLINED = 20.0  # pixels; short side of the smallest object with an outline
_MIN_CONTRAST = 110.0  # RGB distance to the background for three quarters of an object's pixels
_MAX_TILT = math.pi / 8  # radians
_SHIFT = 4  # fractional bits of the coordinates given to OpenCV

Field = NDArray[np.float32]
Contour = NDArray[np.float32]


def write_shapes(root: Path, *, train: int = 640, val: int = 100, size: int = 144, seed: int = 0) -> None:
    """Write images/{train,val}/*.jpg and labels/{train,val}/*.txt under `root`, unless they exist.

    The folder is written beside `root` and renamed, so readers see all or nothing. Of concurrent writers one wins.

    Args:
        train, val: numbers of images.
        size: long side of the images in pixels; the short side is 0.75 to 1 of it.
        seed: another seed gives other images.
    """
    if _is_written(root):
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}.") as folder:
        staged = Path(folder) / root.name
        for split, count in (("train", train), ("val", val)):
            _write_split(staged, split, count, size, seed)
        try:
            staged.rename(root)
        except OSError as error:
            if not _is_written(root):
                raise UserError(
                    f"{root}: cannot put the shapes dataset here ({error.strerror}). Expected no such folder or an "
                    "empty one; move it away, or give the dataset another path."
                ) from error


def render_image(
    split: str, number: int, *, size: int = 144, seed: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.float32]]:
    """Render image `number` of a split, "train" or "val", with a long side of `size` pixels.

    Returns:
        Image uint8 (H, W, 3) RGB, classes int32 (n,), boxes float32 (n, 4) xyxy pixels. A box encloses the pixels
        of its object inside the image, hidden ones included.
    """
    rng = np.random.default_rng([seed, _STREAMS[split], number])
    short = round(size * rng.uniform(0.75, 1.0))
    height, width = (size, short) if rng.random() < 0.5 else (short, size)
    image = _background(rng, height, width)
    _render_lines(rng, image, int(rng.integers(0, 4)))
    most = 0 if rng.random() < _BACKGROUND_FRACTION else int(rng.integers(*_OBJECTS))
    classes, boxes = _render_objects(rng, image, most)
    _render_lines(rng, image, int(rng.integers(0, 2)))
    image += _grain(rng, image.shape, 6)
    return image.clip(0, 255).astype(np.uint8), classes, boxes


def _is_written(root: Path) -> bool:
    return all((root / kind / split).is_dir() for kind in ("images", "labels") for split in _STREAMS)


def _write_split(root: Path, split: str, count: int, size: int, seed: int) -> None:
    images, labels = root / "images" / split, root / "labels" / split
    images.mkdir(parents=True)
    labels.mkdir(parents=True)
    for number in tqdm(range(count), f"Generating {split}", unit="image", disable=None):
        image, classes, boxes = render_image(split, number, size=size, seed=seed)
        encoded, jpeg = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 92])
        assert encoded
        (images / f"{number:05d}.jpg").write_bytes(jpeg.tobytes())
        # Background images have an empty label file or none.
        if len(classes) or number % 2:
            (labels / f"{number:05d}.txt").write_text(_label_rows(classes, boxes, image.shape[:2]), encoding="utf-8")


def _label_rows(classes: NDArray[np.int32], boxes: NDArray[np.float32], size_hw: tuple[int, ...]) -> str:
    height, width = size_hw
    rows = []
    for index, (left, top, right, bottom) in zip(classes, boxes.tolist(), strict=True):
        x, y = (left + right) / 2 / width, (top + bottom) / 2 / height
        rows.append(f"{index} {x:.6f} {y:.6f} {(right - left) / width:.6f} {(bottom - top) / height:.6f}\n")
    return "".join(rows)


def _background(rng: np.random.Generator, height: int, width: int) -> NDArray[np.float32]:
    """Return a textured background, float32 (H, W, 3) in 0..255."""
    y, x = np.mgrid[:height, :width].astype(np.float32)
    texture = _TEXTURES[rng.integers(len(_TEXTURES))]
    weight = texture(rng, x, y)[..., None]
    first = rng.uniform(20, 235, 3).astype(np.float32)
    second = (first + rng.normal(0, 45, 3).astype(np.float32)).clip(0, 255)
    return np.clip(first + (second - first) * weight + _grain(rng, (height, width, 1), 10), 0, 255)


def _grain(rng: np.random.Generator, shape: tuple[int, ...], strongest: float) -> NDArray[np.float32]:
    """Return normal noise of a random standard deviation up to `strongest`."""
    return rng.standard_normal(shape, np.float32) * np.float32(rng.uniform(0, strongest))


def _along(rng: np.random.Generator, x: Field, y: Field) -> Field:
    """Return the distance in pixels along a random direction."""
    angle = rng.uniform(0, 2 * math.pi)
    return (x * math.cos(angle) + y * math.sin(angle)).astype(np.float32)


def _gradient(rng: np.random.Generator, x: Field, y: Field) -> Field:
    ramp = _along(rng, x, y)
    return (ramp - ramp.min()) / np.ptp(ramp)


def _clouds(rng: np.random.Generator, x: Field, y: Field) -> Field:
    cells = int(rng.integers(3, 14))
    coarse = rng.random((cells, cells), np.float32)
    return cv2.resize(coarse, x.shape[::-1], interpolation=cv2.INTER_CUBIC).astype(np.float32)


def _stripes(rng: np.random.Generator, x: Field, y: Field) -> Field:
    return (_along(rng, x, y) // rng.uniform(4, 24) % 2).astype(np.float32)


def _checks(rng: np.random.Generator, x: Field, y: Field) -> Field:
    angle, side = rng.uniform(0, math.pi / 2), rng.uniform(6, 28)
    across = (x * math.cos(angle) + y * math.sin(angle)) // side
    down = (y * math.cos(angle) - x * math.sin(angle)) // side
    return ((across + down) % 2).astype(np.float32)


def _blobs(rng: np.random.Generator, x: Field, y: Field) -> Field:
    height, width = x.shape
    field = np.zeros_like(x)
    for _ in range(int(rng.integers(3, 15))):
        distance2 = (x - rng.uniform(0, width)) ** 2 + (y - rng.uniform(0, height)) ** 2
        field = np.maximum(field, np.exp(-distance2 / (2 * rng.uniform(4, 30) ** 2)))
    return field.astype(np.float32)


Texture = Callable[[np.random.Generator, Field, Field], Field]
_TEXTURES: tuple[Texture, ...] = (_gradient, _clouds, _stripes, _checks, _blobs)


def _render_lines(rng: np.random.Generator, image: NDArray[np.float32], count: int) -> None:
    """Draw distractor lines into `image`."""
    height, width = image.shape[:2]
    for _ in range(count):
        start, end = (rng.uniform(0, 1, 2) * (width, height) for _ in range(2))
        colour = rng.uniform(0, 255, 3).tolist()
        cv2.line(image, _fixed(start).tolist(), _fixed(end).tolist(), colour, int(rng.integers(1, 3)), shift=_SHIFT)


def _render_objects(
    rng: np.random.Generator, image: NDArray[np.float32], most: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Draw up to `most` objects into `image`; return classes int32 (n,), boxes float32 (n, 4)."""
    height, width = image.shape[:2]
    on_top = np.full((height, width), -1, np.int64)  # visible object of each pixel
    classes: list[int] = []
    boxes: list[tuple[int, int, int, int]] = []
    areas: list[int] = []
    while most > len(classes):
        kind = int(rng.integers(len(NAMES)))
        for _ in range(10):
            beside = boxes[-1] if boxes and rng.random() < 0.25 else None
            contours = _place(rng, NAMES[kind], height, width, beside)
            alpha = np.zeros((height, width), np.uint8)
            cv2.fillPoly(alpha, [_fixed(c) for c in contours], 255, cv2.LINE_AA, _SHIFT)
            mask = alpha >= 128
            if mask.sum() < _MIN_INSIDE * _area(contours) or _would_hide(mask, on_top, areas):
                continue
            _paint(rng, image, contours, alpha)
            on_top[mask] = len(classes)
            left, top, box_width, box_height = cv2.boundingRect(mask.astype(np.uint8))
            classes.append(kind)
            boxes.append((left, top, left + box_width, top + box_height))
            areas.append(int(mask.sum()))
            break
        else:  # the image is full
            break
    return np.array(classes, np.int32), np.array(boxes, np.float32).reshape(-1, 4)


def _would_hide(mask: NDArray[np.bool_], on_top: NDArray[np.int64], areas: list[int]) -> bool:
    """Return whether an object over `mask` would leave one below it with too few visible pixels."""
    remaining = np.bincount(on_top[~mask] + 1, minlength=len(areas) + 1)[1:]
    return bool((remaining < _MIN_VISIBLE * np.array(areas)).any())


def _place(
    rng: np.random.Generator, name: str, height: int, width: int, beside: tuple[int, int, int, int] | None
) -> list[Contour]:
    """Return the contours of a random shape in the image, or near the box `beside`: rotated, stretched, scaled."""
    outline, *holes = _contours(rng, name)
    angle, stretch = rng.uniform(-_MAX_TILT, _MAX_TILT), rng.uniform(0.8, 1.0)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    transform = turn @ np.diag([1.0, stretch])
    placed = [contour @ transform.T for contour in (outline, *holes)]
    low, high = placed[0].min(0), placed[0].max(0)
    longest = max(height, width)
    exponent = rng.random() ** 0.4  # fewer tiny objects than log-uniform
    extent = _MIN_EXTENT * max(_MAX_EXTENT * longest / _MIN_EXTENT, 1.1) ** exponent
    if beside is None:
        centre = rng.uniform(0, 1, 2) * (width, height)
    else:
        left, top, right, bottom = beside
        centre = np.array([left + right, top + bottom]) / 2 + rng.normal(0, 0.5, 2) * (right - left, bottom - top)
    scale = extent / (high - low).max()
    return [((contour - (low + high) / 2) * scale + centre).astype(np.float32) for contour in placed]


def _contours(rng: np.random.Generator, name: str) -> list[Contour]:
    """Return the contours of a shape of about unit radius, each (k, 2): the outline, then its holes."""
    if name == "circle":
        return [_polygon(64)]
    if name == "ring":
        return [_polygon(64), _polygon(64) * np.float32(rng.uniform(0.45, 0.65))]
    if name == "square":
        return [np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], np.float32)]
    if name == "triangle":
        return [_polygon(3)]
    if name == "star":
        star = _polygon(10)
        star[1::2] *= np.float32(rng.uniform(0.38, 0.5))
        return [star]
    assert name == "cross", name
    arm = rng.uniform(0.22, 0.36)
    corner = np.array([[1, -arm], [1, arm], [arm, arm]])
    quarter = np.array([[0, -1], [1, 0]])
    return [np.concatenate([corner @ np.linalg.matrix_power(quarter, k).T for k in range(4)]).astype(np.float32)]


def _polygon(corners: int) -> Contour:
    """Regular polygon with its first corner on top."""
    angles = np.arange(corners) * (2 * math.pi / corners)
    return np.stack((np.sin(angles), -np.cos(angles)), 1).astype(np.float32)


def _area(contours: list[Contour]) -> float:
    outline, *holes = (cv2.contourArea(contour) for contour in contours)
    return outline - sum(holes)


def _paint(
    rng: np.random.Generator, image: NDArray[np.float32], contours: list[Contour], alpha: NDArray[np.uint8]
) -> None:
    """Fill a shape with a shaded colour that contrasts with what it covers; outline some."""
    left, top, width, height = cv2.boundingRect(alpha)
    window = np.s_[top : top + height, left : left + width]
    fill = _contrasting(rng, image[alpha >= 128])
    y, x = np.mgrid[:height, :width].astype(np.float32)
    shade = (_gradient(rng, x, y)[..., None] - 0.5) * np.float32(rng.uniform(0, 60))
    layer = np.clip(fill + shade, 0, 255)
    # An outline on a tiny shape would leave no fill, and turn a circle into a ring.
    if np.ptp(contours[0], axis=0).min() > _MIN_OUTLINED and rng.random() < 0.4:
        edge = _contrasting(rng, fill[None])
        thickness = int(rng.integers(1, 4))  # the outer half is masked
        points = [_fixed(contour - np.array([left, top], np.float32)) for contour in contours]
        cv2.polylines(layer, points, True, edge.tolist(), thickness, shift=_SHIFT)
    weight = alpha[window][..., None] / np.float32(255)
    image[window] += (layer - image[window]) * weight


def _contrasting(rng: np.random.Generator, colours: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a random RGB colour, (3,), that differs from most of `colours` (n, 3)."""
    best, best_distance = np.zeros(3, np.float32), -1.0
    for _ in range(12):
        colour = rng.uniform(0, 255, 3).astype(np.float32)
        distance = float(np.quantile(np.linalg.norm(colours - colour, axis=1), 0.25))
        if distance > best_distance:
            best, best_distance = colour, distance
        if best_distance >= _MIN_CONTRAST:
            break
    return best


def _fixed(points: NDArray[np.floating]) -> NDArray[np.int32]:
    """Return pixel coordinates as OpenCV's fixed-point integers; the centre of a pixel is at 0.5."""
    return np.rint((points - 0.5) * 2**_SHIFT).astype(np.int32)
