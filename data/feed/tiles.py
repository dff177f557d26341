"""Views of large images: `--tile` trains on windows of them, and no file is written.

The views of an image are what detection in tiles looks at: its tiles and the whole, each an image of its own for the
sampler, mosaics and statistics. A tile's labels are cut to it. An object of which it shows less than `LEAST_SEEN` is
none there, and what is seen of it is an ignored region: the next tile shows more of it. Most tiles of most scenes are
empty: an epoch has all views with objects, the whole images, and as many empty tiles as there are views with objects,
other ones in each epoch. Tiles with ignored regions alone, such as the inside of a large object, are in none.

Legend: P images, N views; of one image w windows, m objects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tessera.data.augment.labels import MIN_SIDE, clip_outlines
from tessera.data.feed.tile_grid import Tile, check_tiles, windows_of
from tessera.utils.boxes import clip_boxes
from tessera.utils.errors import UserError
from tessera.utils.seeding import at_most, sample_rng
from tessera.utils.types import DatasetIndex

LEAST_SEEN = 0.3  # share of an object's area in the image (of its polygon, where it has one) that a view must show
_SOON_S = 1.0  # what is done by then needs no progress bar


@dataclass(frozen=True, kw_only=True)
class ViewIndex(DatasetIndex):
    """An index whose entries are views; sizes and labels are in pixels of the window."""

    whole_images: DatasetIndex  # paths, in files as in memory, are its own
    view_offsets: NDArray[np.int64]  # (P + 1,), where the views of each image start
    windows: NDArray[np.int32]  # (N, 4), left, top, right, bottom in pixels of the image
    unseen: int  # how many objects no view has as one

    def path(self, index: int) -> Path:
        """Path of the image that view `index` is of."""
        return self.whole_images.path(int(self.owners[index]))

    def of_picture(self, index: int) -> range:
        """The views of the image that view `index` is of."""
        start, end = self.view_offsets[self.owners[index] :][:2].tolist()
        return range(start, end)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """The image of each view, int64 (N,)."""
        return np.repeat(np.arange(len(self.whole_images)), np.diff(self.view_offsets))

    @cached_property
    def empty_tiles(self) -> NDArray[np.int64]:
        """The tiles without objects and ignored regions; whole images are none of them."""
        empty = ~self._always
        if len(self.ignored_offsets):
            empty &= np.diff(self.ignored_offsets) == 0
        return np.flatnonzero(empty)

    @cached_property
    def _always(self) -> NDArray[np.bool_]:
        """Which views are in every epoch, (N,): those with objects, and the whole images."""
        found = np.diff(self.box_offsets) > 0
        found[self.view_offsets[1:] - 1] = True
        return found

    @property
    def with_objects(self) -> int:
        """How many views have objects."""
        return int((np.diff(self.box_offsets) > 0).sum())

    @property
    def images_per_epoch(self) -> int:
        """How many views an epoch has."""
        return int(self._always.sum()) + min(len(self.empty_tiles), self.with_objects)

    def of_epoch(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """The views of an epoch, ascending: a pure function of (seed, epoch)."""
        chosen = at_most(self.with_objects, len(self.empty_tiles), sample_rng(seed, epoch, 2, "order"))
        return np.sort(np.concatenate((np.flatnonzero(self._always), self.empty_tiles[chosen])))

    def __str__(self) -> str:
        """One line: what the images became."""
        objects = len(self.whole_images.classes)
        unseen = f"; {self.unseen:,} of {objects:,} objects are ignored in all" if self.unseen else ""
        return (
            f"{self.split}: {len(self.whole_images):,} images become {len(self):,} views, {self.with_objects:,} of "
            f"them with objects; an epoch has {self.images_per_epoch:,}{unseen}"
        )


class _Cut(NamedTuple):
    """The views of one image, labels view by view; n labels, r ignored regions."""

    windows: Sequence[Tile]
    counts: NDArray[np.int64]  # (w,)
    classes: NDArray[np.int32]  # (n,)
    boxes_xyxy: NDArray[np.float32]  # (n, 4)
    outlines: list[NDArray[np.float32]]  # n, or [] in a dataset without any
    ignored_counts: NDArray[np.int64]  # (w,)
    ignored_classes: NDArray[np.int32]  # (r,)
    ignored_boxes_xyxy: NDArray[np.float32]  # (r, 4)
    unseen: int


def view_index(
    images: DatasetIndex, tile: int, overlap: float, imgsz: int, *, show_progress: bool = False
) -> ViewIndex:
    """The views of an index of images that has objects.

    Args:
        tile: side in pixels of the images; what is not larger is one view, as it is.
        overlap: least share of a tile that the next one overlaps.
        imgsz: training size: of an image that is cut, a label of 2 px or less there is none, as in augmentation.

    Raises:
        ConfigError: a number is out of range.
        UserError: most objects are larger than a tile, or all too small to be seen.
    """
    check_tiles(tile, overlap)
    _refuse_large_objects(images, tile)
    cuts = []
    title, hidden = f"Cutting {images.split} into views", not show_progress
    sizes = tqdm(images.sizes_hw.tolist(), title, unit="image", delay=_SOON_S, disable=hidden)
    for image, (height, width) in enumerate(sizes):
        windows = windows_of((height, width), tile, overlap)
        cuts.append(_cut(images, image, windows, imgsz) if len(windows) > 1 else _as_it_is(images, image))
    spans = np.array([window for cut in cuts for window in cut.windows], np.int32)
    outlines = [outline for cut in cuts for outline in cut.outlines]
    unseen = sum(cut.unseen for cut in cuts)
    if unseen == len(images.classes):
        raise UserError(
            f"--tile {tile}: no view of {images.split} has an object: at --imgsz {imgsz} each is {MIN_SIDE:g} pixels "
            "or less. Give a larger --imgsz or a smaller --tile."
        )
    key = f"{tile} {overlap!r} {LEAST_SEEN}"
    any_ignored = any(len(cut.ignored_classes) for cut in cuts)
    views = ViewIndex(
        split=images.split,
        names=images.names,
        path_bytes=images.path_bytes,
        path_offsets=images.path_offsets,
        sizes_hw=spans[:, [3, 2]] - spans[:, [1, 0]],
        box_offsets=_offsets([cut.counts for cut in cuts]),
        classes=np.concatenate([cut.classes for cut in cuts]),
        boxes_xyxy=np.concatenate([cut.boxes_xyxy for cut in cuts]),
        segment_offsets=_offsets([[len(outline) for outline in outlines]]) if outlines else images.segment_offsets,
        segment_points=np.concatenate(outlines) if outlines else images.segment_points,
        digest=_hash(f"{images.digest} {key}"),
        problems=images.problems,
        notes=images.notes,
        ignored_offsets=_offsets([cut.ignored_counts for cut in cuts]) if any_ignored else images.ignored_offsets,
        ignored_classes=np.concatenate([cut.ignored_classes for cut in cuts]),
        ignored_boxes_xyxy=np.concatenate([cut.ignored_boxes_xyxy for cut in cuts]),
        pixels=images.pixels,
        whole_images=images,
        view_offsets=_offsets([[len(cut.windows) for cut in cuts]]),
        windows=spans,
        unseen=unseen,
    )
    return replace(views, stored_hash=_hash(f"{views.content_hash()} {key}")[:16])  # its labels depend on imgsz too


def _refuse_large_objects(images: DatasetIndex, tile: int) -> None:
    sides = (images.boxes_xyxy[:, 2:] - images.boxes_xyxy[:, :2]).max(1)
    large = int((sides > tile).sum())
    if 2 * large > len(sides):
        raise UserError(
            f"--tile {tile}: {large:,} of {len(sides):,} boxes of {images.split} are larger than a tile, so that no "
            f"tile sees them whole; half of all are longer than {np.median(sides):.0f} pixels. Give a --tile that is "
            f"a few times as large as the objects, or leave it out."
        )


def _as_it_is(images: DatasetIndex, image: int) -> _Cut:
    """The one view of an image that is not larger than a tile."""
    height, width = images.sizes_hw[image].tolist()
    (classes, boxes), (ignored, regions) = images.labels(image), images.ignored(image)
    counts, ignored_counts = np.array([len(classes)]), np.array([len(ignored)])
    outlines, whole = images.segments(image), [Tile(0, 0, width, height)]
    return _Cut(whole, counts, classes, boxes, outlines, ignored_counts, ignored, regions, 0)


def _cut(images: DatasetIndex, image: int, windows: Sequence[Tile], imgsz: int) -> _Cut:
    """The views of an image that is larger than a tile: tiles of one size, then the whole."""
    spans = np.array(windows, np.float64)
    classes, boxes = images.labels(image)
    parts, share = _seen(boxes, spans)
    outlines = images.segments(image)
    cut_outlines = _seen_outlines(outlines, spans, parts, share) if any(map(len, outlines)) else {}
    scale = imgsz / (spans[:, 2:] - spans[:, :2]).max(1)
    sizes = (parts[..., 2:] - parts[..., :2]) * scale[:, None, None]
    kept = (share >= LEAST_SEEN) & (sizes.min(2) > MIN_SIDE)
    views, objects = np.nonzero(kept)
    regions = _with_parts(*images.ignored(image), spans, parts, (share > 0) & ~kept)
    none = np.zeros((0, 2), np.float32)
    return _Cut(
        windows,
        kept.sum(1),
        classes[objects],
        (parts[kept] - spans[views][:, [0, 1, 0, 1]]).astype(np.float32),
        [cut_outlines.get(pair, none) for pair in zip(views.tolist(), objects.tolist(), strict=True) if outlines],
        *regions,
        int((~kept.any(0)).sum()),
    )


def _with_parts(
    classes: NDArray[np.int32],
    boxes: NDArray[np.float32],
    spans: NDArray[np.float64],
    parts: NDArray[np.float64],
    is_ignored: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """What windows show of r ignored regions, and the parts of objects that are to be ignored, as in `_Cut`.

    `parts`, (w, m, 4), are what windows show of the objects; `is_ignored`, (w, m), which of them are to be ignored.
    """
    region_parts, share = _seen(boxes, spans)
    shown = np.concatenate((share > 0, is_ignored), 1)
    views, rows = np.nonzero(shown)
    found = np.concatenate((region_parts, parts), 1)[shown] - spans[views][:, [0, 1, 0, 1]]
    any_class = np.full(is_ignored.shape[1], -1, np.int32)
    return shown.sum(1), np.concatenate((classes, any_class))[rows], found.astype(np.float32)


def _seen(boxes: NDArray[np.float32], spans: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What windows (w, 4), the last of them the whole image, show of boxes (m, 4), all in pixels of the image.

    Returns:
        The parts, (w, m, 4), and the share of what is in the image, (w, m): 0 for a box without an area.
    """
    inside = clip_boxes(boxes.astype(np.float64), (int(spans[-1, 3]), int(spans[-1, 2])))
    low = np.maximum(inside[None, :, :2], spans[:, None, :2])
    high = np.maximum(np.minimum(inside[None, :, 2:], spans[:, None, 2:]), low)
    areas = (inside[:, 2:] - inside[:, :2]).prod(1)
    share = np.where(areas > 0, (high - low).prod(2) / np.where(areas > 0, areas, 1), 0)
    return np.concatenate((low, high), 2), share


def _seen_outlines(
    outlines: Sequence[NDArray[np.float32]],
    spans: NDArray[np.float64],
    parts: NDArray[np.float64],
    share: NDArray[np.float64],
) -> dict[tuple[int, int], NDArray[np.float32]]:
    """What windows show of polygons; of objects that have one, `parts` and `share` become those of the polygon.

    Args:
        outlines: m polygons (k, 2) in pixels of the image, k = 0: none.
        spans, parts, share: as in `_seen`; the last two are overwritten.

    Returns:
        Window and object → what is left of the polygon, in pixels of the window.
    """
    whole = _inside(outlines, spans[-1, 2:])
    areas = [_area(points) for points in whole]
    outlined = np.array(areas) > 0
    around = np.array([[*points.min(0), *points.max(0)] if len(points) else [0.0] * 4 for points in whole])
    within = np.all((around[:, :2] >= spans[:, None, :2]) & (around[:, 2:] <= spans[:, None, 2:]), axis=2)
    within[-1] = True  # the image itself: what was cut to it may have been rounded
    seen = (share > 0) & outlined
    share[:, outlined] = 0
    pairs = np.argwhere(seen & ~within).tolist()
    moved = [whole[thing] - spans[view, :2] for view, thing in pairs]
    found = {}
    for (view, thing), points in zip(pairs, _inside(moved, spans[0, 2:] - spans[0, :2]), strict=True):  # of one size
        if len(points):
            share[view, thing] = _area(points) / areas[thing]
            parts[view, thing] = np.concatenate((points.min(0), points.max(0))) + np.tile(spans[view, :2], 2)
            found[view, thing] = points.astype(np.float32)
    for view, thing in np.argwhere(seen & within).tolist():
        share[view, thing], parts[view, thing] = 1, around[thing]
        found[view, thing] = (whole[thing] - spans[view, :2]).astype(np.float32)
    return found


def _inside(outlines: Sequence[NDArray[Any]], size_wh: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Polygons (k, 2) cut to 0 … width, 0 … height."""
    if not outlines:
        return []
    owners = np.repeat(np.arange(len(outlines)), [len(points) for points in outlines])
    planes = np.array([[1, 0, 0], [0, 1, 0], [-1, 0, size_wh[0]], [0, -1, size_wh[1]]])
    points, owners = clip_outlines(np.concatenate(outlines).astype(np.float64), owners, planes)
    return np.split(points, np.cumsum(np.bincount(owners, minlength=len(outlines)))[:-1])


def _area(points: NDArray[np.float64]) -> float:
    """Of a closed polygon (k, 2), by the shoelace formula."""
    x, y = points.T
    return abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2


def _offsets(counts: Sequence[Any]) -> NDArray[np.int64]:
    """Starts, int64 (n + 1,), from n counts in several parts."""
    return np.concatenate(([0], np.cumsum(np.concatenate([np.asarray(part, np.int64) for part in counts]))))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
