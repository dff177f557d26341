"""Detection on whole images: resize, letterbox, network, NMS, boxes in the image's pixels; with tiles or without.

Every step is the function that validation uses, in the same order and precision.

The detections of overlapping tiles are merged, so that each object is detected once. Two detections of one class from
different tiles are one object where, clipped to the overlap of both tiles, their IoU exceeds the NMS threshold. Where
one of them touches a seam (a side of its tile inside the image), the intersection over the smaller box counts instead,
since a tile may show a part of an object only. The best pairs are merged first, and a tile contributes at most one
detection to an object. Of the detections of an object, the best one that touches no seam stays; where all touch one,
the box around them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.data.augment.pipeline import Placement, letterbox
from tessera.data.feed.image_sizes import (
    DEFAULT_OVERLAP,
    Tile,
    check_tiles,
    rect_val_shapes,
    resized,
    resized_sizes,
    tile_windows,
)
from tessera.models.nms import NmsSettings, nms_of_candidates, non_max_suppression, select_candidates, undo_letterbox
from tessera.utils.evaluation.network import ImageDetector, Model, Network, TimedDetections, network_nms
from tessera.utils.image_size import ImageSize
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.types import Detections, Sample

_NO_BOXES, _NO_CLASSES = np.zeros((0, 4), np.float32), np.zeros(0, np.int32)
_EDGE, _LEAST_EDGE = 0.01, 2.0  # a box this near to a seam touches it: fraction of the tile, pixels
_MOST_IOU = 0.5  # for networks without NMS
_SMALLER = 0.5  # intersection over the smaller box of one object at a seam
_LEAST_SEEN = 0.1  # visible fraction of a box in the overlap; less may be a neighbouring object

Boxes = NDArray[np.float32]


def image_detector(
    model: Network | ImageDetector, imgsz: ImageSize, tile: int = 0, overlap: float = DEFAULT_OVERLAP
) -> ImageDetector:
    """Return the detector of whole images of an opened model.

    Args:
        model: a network, which gets preprocessing and postprocessing, or a detector.
        imgsz: size that images are resized to, multiples of the stride.
        tile: split larger images into tiles of this many pixels, besides the whole image; 0 = off.
        overlap: smallest overlap of neighbouring tiles as a fraction of a tile.

    Raises:
        ConfigError: `tile` or `overlap` is out of range.
    """
    if tile:
        check_tiles(tile, overlap)

    def untiled(image: NDArray[np.uint8], rules: NmsSettings) -> TimedDetections:
        if isinstance(model, Network):
            return _of_network(model, imgsz, image, rules)
        return model(image, rules)

    def detect(image: NDArray[np.uint8], rules: NmsSettings) -> TimedDetections:
        rules, size_hw = network_nms(rules, model), image_hw(image)
        tiles = tile_windows(size_hw, tile, overlap) if tile else []
        if len(tiles) < 2:
            return untiled(image, rules)
        parts, spent = [], np.zeros(3)
        for left, top, right, bottom in tiles:
            found, speed_ms = untiled(np.ascontiguousarray(image[top:bottom, left:right]), rules)
            moved = found.boxes_xyxy + found.boxes_xyxy.new_tensor((left, top, left, top))
            parts.append(Detections(moved, found.scores, found.classes))
            spent += speed_ms
        started = time.perf_counter()
        joined = join(tiles, parts, size_hw, rules)
        spent[2] += 1000 * (time.perf_counter() - started)
        preprocessing, inference, nms = spent.tolist()
        return TimedDetections(joined, (preprocessing, inference, nms))

    described = {field.name: getattr(model, field.name) for field in dataclasses.fields(Model)}
    return ImageDetector(**described, detect=detect)


def _of_network(network: Network, imgsz: ImageSize, image: NDArray[np.uint8], rules: NmsSettings) -> TimedDetections:
    started, accelerator = time.perf_counter(), network.accelerator
    canvas, placement = letterbox_image(image, imgsz, network.stride, network.size_hw)
    with torch.no_grad():  # ends before a caller has the result
        images = network_input(canvas, accelerator.device)
        prepared = time.perf_counter()
        decoded = network(images)
        accelerator.synchronize()
        predicted = time.perf_counter()
        in_batch = _apply_nms(decoded, rules, accelerator)
        placed = undo_letterbox(in_batch, torch.tensor(placement, dtype=torch.float64), image_hw(image))
    times = (started, prepared, predicted, time.perf_counter())
    preprocessing, inference, nms = (1000 * (b - a) for a, b in pairwise(times))
    return TimedDetections(placed, (preprocessing, inference, nms))


def _apply_nms(decoded: Tensor, rules: NmsSettings, accelerator: Accelerator) -> Detections:
    """Return the detections of a batch of one image on the host."""
    if accelerator.queue_depth:  # as in a validation, the host waits for one copy
        return nms_of_candidates(select_candidates(decoded, rules).cpu()[0], rules)
    (found,) = non_max_suppression(decoded, rules, accelerator.widest)
    return found.cpu()


def nms_settings(
    model: Model, *, conf: float, iou: float, max_det: int, agnostic: bool = False, class_confs: tuple[float, ...] = ()
) -> NmsSettings:
    """Return the NMS settings of a model: multi-label as in a validation, unless there is one class."""
    one_class = len(model.names) == 1
    rules = NmsSettings(
        conf, iou, max_det, multi_label=not one_class, agnostic=agnostic or one_class, class_confs=class_confs
    )
    return network_nms(rules, model)


def letterbox_image(
    image: NDArray[np.uint8], imgsz: ImageSize, stride: int, size_hw: tuple[int, int] | None = None
) -> tuple[NDArray[np.uint8], Placement]:
    """Resize uint8 (H, W, 3) RGB to the size `imgsz` and letterbox it to multiples of `stride`, or to `size_hw`.

    Returns:
        uint8 (h, w, 3), and the placement scale_x, scale_y, left, top: x = x_image · scale_x + left.
    """
    height, width = image_hw(image)
    original_hw = np.array((height, width))
    loaded_h, loaded_w = resized_sizes(original_hw, imgsz).tolist()
    small = resized(image, (loaded_h, loaded_w), area=max(height, width) > max(loaded_h, loaded_w))
    shape_h, shape_w = size_hw or rect_val_shapes(original_hw[None], imgsz, stride)[0].tolist()
    placed, (scale_x, scale_y, left, top) = letterbox(Sample(small, _NO_BOXES, _NO_CLASSES), (shape_h, shape_w))
    return placed.image, (scale_x * (loaded_w / width), scale_y * (loaded_h / height), left, top)


def network_input(canvas: NDArray[np.uint8], device: torch.device) -> Tensor:
    """Convert uint8 (H, W, 3) to float32 (1, 3, H, W) in 0 … 1 on `device`, as `Batch.images_on`."""
    return torch.from_numpy(canvas[None]).to(device).permute(0, 3, 1, 2).float().div_(255)


def image_hw(image: NDArray[np.uint8]) -> tuple[int, int]:
    return image.shape[0], image.shape[1]


def join(
    tiles: Sequence[Tile], parts: Sequence[Detections], size_hw: tuple[int, int], rules: NmsSettings
) -> Detections:
    """Return one detection per object, descending by score, by the `iou`, `agnostic` and `max_det` of `rules`.

    `parts` are the detections of each tile on the host, in pixels of the image. The whole image may be a tile.
    """
    counts = [len(part) for part in parts]
    starts = np.cumsum([0, *counts])
    tile_of = np.repeat(np.arange(len(tiles)), counts)
    boxes = torch.cat([part.boxes_xyxy for part in parts]).numpy().astype(np.float32)
    scores = torch.cat([part.scores for part in parts]).numpy()
    classes = torch.cat([part.classes for part in parts]).numpy()
    touches = np.concatenate(
        [_touches(boxes[starts[i] : starts[i + 1]], view, size_hw) for i, view in enumerate(tiles)]
    )
    pairs: list[tuple[float, int, int]] = []
    for i, j in combinations(range(len(tiles)), 2):
        view = _common(tiles[i], tiles[j])
        first, second = np.arange(starts[i], starts[i + 1]), np.arange(starts[j], starts[j + 1])
        if view is not None and len(first) and len(second):
            same = np.ones((len(first), len(second)), bool)
            if not rules.agnostic:
                same = classes[first][:, None] == classes[second][None]
            near = touches[first][:, None] | touches[second][None]
            agreement = _agreement(boxes[first], boxes[second], view, near, min(rules.iou, _MOST_IOU))
            a, b = np.nonzero(same & (agreement > 0))
            pairs += zip(agreement[a, b].tolist(), first[a].tolist(), second[b].tolist(), strict=True)
    groups = _groups(len(boxes), sorted(pairs, key=lambda pair: -pair[0]), tile_of)
    rows = [_one(boxes[group], scores[group], classes[group], touches[group]) for group in groups]
    table = torch.tensor(np.array(rows, np.float32).reshape(-1, 6))
    return nms_of_candidates(table[table[:, 4].argsort(descending=True, stable=True)], rules)


def _touches(boxes: Boxes, tile: Tile, size_hw: tuple[int, int]) -> NDArray[np.bool_]:
    """Return whether boxes (n, 4) end at a seam of their tile."""
    edge = max(_LEAST_EDGE, _EDGE * max(tile.right - tile.left, tile.bottom - tile.top))
    inner = np.array([tile.left > 0, tile.top > 0, tile.right < size_hw[1], tile.bottom < size_hw[0]])
    found: NDArray[np.bool_] = ((np.abs(boxes - np.array(tile)) < edge) & inner).any(1)
    return found


def _common(a: Tile, b: Tile) -> Tile | None:
    """Return the overlap of two tiles; None where there is none."""
    view = Tile(max(a.left, b.left), max(a.top, b.top), min(a.right, b.right), min(a.bottom, b.bottom))
    return view if view.left < view.right and view.top < view.bottom else None


def _agreement(a: Boxes, b: Boxes, view: Tile, near: NDArray[np.bool_], iou: float) -> NDArray[np.float64]:
    """Return the IoU in `view` of boxes (n, 4) and (m, 4) that may be one object; 0 for other pairs.

    `near` (n, m): whether one of the two touches a seam.
    """
    parts = [np.concatenate((np.maximum(x[:, :2], view[:2]), np.minimum(x[:, 2:], view[2:])), 1) for x in (a, b)]
    seen_a, seen_b = (_areas(part) for part in parts)
    low = np.maximum(parts[0][:, None, :2], parts[1][None, :, :2])
    high = np.minimum(parts[0][:, None, 2:], parts[1][None, :, 2:])
    shared = (high - low).clip(0).astype(np.float64).prod(2)
    overlap = shared / np.maximum(seen_a[:, None] + seen_b[None] - shared, 1e-9)
    visible_a, visible_b = (seen / np.maximum(_areas(x), 1e-9) for seen, x in ((seen_a, a), (seen_b, b)))
    visible = np.where(seen_a[:, None] <= seen_b[None], visible_a[:, None], visible_b[None])
    of_smaller = shared / np.maximum(np.minimum(seen_a[:, None], seen_b[None]), 1e-9)
    agree = (overlap > iou) | (near & (of_smaller > _SMALLER) & (visible >= _LEAST_SEEN))
    return np.where(agree, overlap, 0.0)


def _areas(boxes: Boxes) -> NDArray[np.float64]:
    areas: NDArray[np.float64] = (boxes[:, 2:] - boxes[:, :2]).clip(0).astype(np.float64).prod(1)
    return areas


def _groups(count: int, pairs: Sequence[tuple[float, int, int]], tile_of: NDArray[np.int64]) -> list[list[int]]:
    """Group the detections of each object, best pairs first, never two of one tile."""
    group_of = list(range(count))
    members = {number: [number] for number in range(count)}
    tiles = {number: {int(tile_of[number])} for number in range(count)}
    for _, a, b in pairs:
        one, other = group_of[a], group_of[b]
        if one != other and not tiles[one] & tiles[other]:
            for number in members[other]:
                group_of[number] = one
            members[one] += members.pop(other)
            tiles[one] |= tiles.pop(other)
    return list(members.values())


def _one(
    boxes: Boxes, scores: NDArray[np.float32], classes: NDArray[np.int64], touches: NDArray[np.bool_]
) -> tuple[float, ...]:
    """Return x1, y1, x2, y2, score and class of an object."""
    best = int(np.where(touches, -1.0, scores).argmax()) if not touches.all() else int(scores.argmax())
    box = boxes[best]
    if touches.all():
        box = np.concatenate((boxes[:, :2].min(0), boxes[:, 2:].max(0)))
    return (*box.tolist(), float(scores[best]), float(classes[best]))
