"""Index of the tiles of large images for training (`--tile`): clipped labels, and the tiles of each epoch.

The last tile of an image is the whole image, as in tiled detection. Each tile is an image of its own for the
sampler, mosaics and statistics. Labels are clipped to a tile. An object of which a tile shows less than `MIN_VISIBLE`
becomes an ignored region there, because a neighbouring tile shows more of it. Since most tiles are empty, an epoch has
all tiles with objects, all whole images, and as many empty tiles as tiles with objects, resampled in each epoch.
Tiles with ignored regions alone, such as the inside of a large object, are in no epoch.

Legend: P images, N tiles; of one image w tiles, m objects.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tessera.data.augment.geometry import MIN_SIDE, clip_boxes, clip_polygons
from tessera.data.feed.image_sizes import Tile, check_tiles, fit_ratios, tile_windows
from tessera.data.source.index import offsets_of
from tessera.utils.errors import UserError
from tessera.utils.image_size import ImageSize
from tessera.utils.seeding import sample_indices, sample_rng
from tessera.utils.types import DatasetIndex

MIN_VISIBLE = 0.3  # fraction of an object's area in the image (of its polygon, if any) that a tile must show
_PROGRESS_DELAY_S = 1.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TileIndex(DatasetIndex):
    """Dataset index whose entries are tiles; sizes and labels are in pixels of the tile."""

    whole_images: DatasetIndex
    tile_offsets: NDArray[np.int64]  # (P + 1,), where the tiles of each image start
    bounds: NDArray[np.int32]  # (N, 4), left, top, right, bottom in pixels of the image
    unseen: int  # objects that are ignored in all tiles

    def path(self, index: int) -> Path:
        """Return the path of the image of tile `index`."""
        return self.whole_images.path(int(self.owners[index]))

    def tiles_of_image(self, index: int) -> range:
        """Return all tiles of the image of tile `index`."""
        start, end = self.tile_offsets[self.owners[index] :][:2].tolist()
        return range(start, end)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """Image of each tile, int64 (N,)."""
        return np.repeat(np.arange(len(self.whole_images)), np.diff(self.tile_offsets))

    @cached_property
    def empty_tiles(self) -> NDArray[np.int64]:
        """Indices of the tiles without objects and ignored regions, of images that label any class."""
        empty = ~self._always & ~self.labels_nothing()
        if len(self.ignored_offsets):
            empty &= np.diff(self.ignored_offsets) == 0
        return np.flatnonzero(empty)

    @cached_property
    def _always(self) -> NDArray[np.bool_]:
        """Mask (N,) of the tiles in every epoch: those with objects, and the whole images."""
        found = np.diff(self.box_offsets) > 0
        found[self.tile_offsets[1:] - 1] = True
        return found

    @property
    def with_objects(self) -> int:
        """Number of tiles with objects."""
        return int((np.diff(self.box_offsets) > 0).sum())

    @property
    def images_per_epoch(self) -> int:
        """Number of tiles of an epoch."""
        return int(self._always.sum()) + min(len(self.empty_tiles), self.with_objects)

    def of_epoch(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the tiles of an epoch, ascending: a pure function of (seed, epoch)."""
        chosen = sample_indices(self.with_objects, len(self.empty_tiles), sample_rng(seed, epoch, 2, "order"))
        return np.sort(np.concatenate((np.flatnonzero(self._always), self.empty_tiles[chosen])))

    def __str__(self) -> str:
        objects = len(self.whole_images.classes)
        unseen = f"; {self.unseen:,} of {objects:,} objects are ignored in all tiles" if self.unseen else ""
        return (
            f"{self.split}: {len(self.whole_images):,} images split into {len(self):,} tiles "
            f"({self.with_objects:,} with objects); {self.images_per_epoch:,} tiles per epoch{unseen}"
        )


class _ImageTiles(NamedTuple):
    """Tiles of one image, with labels tile by tile: n labels, r ignored regions."""

    bounds: Sequence[Tile]
    counts: NDArray[np.int64]  # (w,)
    objects: NDArray[np.int64]  # (n,), rows of the objects in the index of the images
    boxes_xyxy: NDArray[np.float32]  # (n, 4)
    outlines: list[NDArray[np.float32]]  # n, or [] in a dataset without any
    ignored_counts: NDArray[np.int64]  # (w,)
    ignored_classes: NDArray[np.int32]  # (r,)
    ignored_boxes_xyxy: NDArray[np.float32]  # (r, 4)
    unseen: int


def build_tile_index(
    images: DatasetIndex, tile: int, overlap: float, imgsz: ImageSize, *, show_progress: bool = False
) -> TileIndex:
    """Build the tile index of a dataset that has objects.

    Args:
        tile: side in pixels; an image that is not larger is a single tile.
        overlap: smallest fraction of a tile that adjacent tiles share.
        imgsz: training size, at which labels of 2 px or less are dropped from tiles, as in augmentation.

    Raises:
        ConfigError: `tile` or `overlap` is out of range.
        UserError: most objects are larger than a tile, or all are too small.
    """
    check_tiles(tile, overlap)
    sides = (images.boxes_xyxy[:, 2:] - images.boxes_xyxy[:, :2]).max(1)
    large = int((sides > tile).sum())
    if 2 * large > len(sides):
        raise UserError(
            f"--tile {tile}: {large:,} of {len(sides):,} boxes of {images.split} are larger than a tile (median long "
            f"side {np.median(sides):.0f} pixels). Use a --tile a few times as large as the objects, or omit it."
        )
    per_image = []
    title, hidden = f"Splitting {images.split} into tiles", not show_progress or None
    sizes = tqdm(images.sizes_hw.tolist(), title, unit="image", delay=_PROGRESS_DELAY_S, disable=hidden)
    for image, (height, width) in enumerate(sizes):
        bounds = tile_windows((height, width), tile, overlap)
        per_image.append(_cut_image(images, image, bounds, imgsz) if len(bounds) > 1 else _whole_image(images, image))
    spans = np.array([bounds for tiles in per_image for bounds in tiles.bounds], np.int32)
    outlines = [outline for tiles in per_image for outline in tiles.outlines]
    unseen = sum(tiles.unseen for tiles in per_image)
    if unseen == len(images.classes):
        raise UserError(
            f"--tile {tile}: no tile of {images.split} has an object: at --imgsz {imgsz} each is {MIN_SIDE:g} pixels "
            "or less. Use a larger --imgsz or a smaller --tile."
        )
    key = f"{tile} {overlap!r} {MIN_VISIBLE}"
    objects = np.concatenate([tiles.objects for tiles in per_image])
    any_ignored = any(len(tiles.ignored_classes) for tiles in per_image)
    tiles = TileIndex(
        split=images.split,
        names=images.names,
        path_bytes=images.path_bytes,
        path_offsets=images.path_offsets,
        sizes_hw=spans[:, [3, 2]] - spans[:, [1, 0]],
        box_offsets=offsets_of(np.concatenate([tiles.counts for tiles in per_image])),
        classes=images.classes[objects],
        boxes_xyxy=np.concatenate([tiles.boxes_xyxy for tiles in per_image]),
        segment_offsets=offsets_of([*map(len, outlines)]) if outlines else images.segment_offsets,
        segment_points=np.concatenate(outlines) if outlines else images.segment_points,
        digest=_hash(f"{images.digest} {key}"),
        problems=images.problems,
        notes=images.notes,
        ignored_offsets=offsets_of(np.concatenate([tiles.ignored_counts for tiles in per_image]))
        if any_ignored
        else images.ignored_offsets,
        ignored_classes=np.concatenate([tiles.ignored_classes for tiles in per_image]),
        ignored_boxes_xyxy=np.concatenate([tiles.ignored_boxes_xyxy for tiles in per_image]),
        unlabelled_sets=images.unlabelled_sets,
        set_of_image=images.set_of_image.repeat([len(tiles.bounds) for tiles in per_image])
        if len(images.set_of_image)
        else images.set_of_image,
        label_weights=images.label_weights[objects] if len(images.label_weights) else images.label_weights,
        pixels=images.pixels,
        whole_images=images,
        tile_offsets=offsets_of([len(tiles.bounds) for tiles in per_image]),
        bounds=spans,
        unseen=unseen,
    )
    log.info(f"--tile {tile}: {tiles}.")
    if len(tiles) == len(images):
        log.warning(f"--tile {tile}: no image of {images.split} is larger; training on whole images.")
    return replace(tiles, stored_hash=_hash(f"{tiles.content_hash()} {key}")[:16])  # labels depend on imgsz too


def _whole_image(images: DatasetIndex, image: int) -> _ImageTiles:
    """Return the single tile of an image that is not larger than a tile."""
    height, width = images.sizes_hw[image].tolist()
    (_, boxes), (ignored, regions) = images.labels(image), images.ignored(image)
    rows = np.arange(*images.box_offsets[image : image + 2])
    counts, ignored_counts = np.array([len(rows)]), np.array([len(ignored)])
    outlines, whole = images.segments(image), [Tile(0, 0, width, height)]
    return _ImageTiles(whole, counts, rows, boxes, outlines, ignored_counts, ignored, regions, 0)


def _cut_image(images: DatasetIndex, image: int, bounds: Sequence[Tile], imgsz: ImageSize) -> _ImageTiles:
    """Return the tiles of an image that is larger than a tile: tiles of one size, then the whole."""
    spans = np.array(bounds, np.float64)
    first = images.box_offsets[image]
    _, boxes = images.labels(image)
    parts, visible = _clip_objects(boxes, spans)
    outlines = images.segments(image)
    cut_outlines = _clip_polygons_to_tiles(outlines, spans, parts, visible) if any(map(len, outlines)) else {}
    to, of = fit_ratios((spans[:, 2:] - spans[:, :2])[:, ::-1], imgsz)
    scale = to / of
    sizes = (parts[..., 2:] - parts[..., :2]) * scale[:, None, None]
    keep = (visible >= MIN_VISIBLE) & (sizes.min(2) > MIN_SIDE)
    tiles, objects = np.nonzero(keep)
    regions = _clip_regions(*images.ignored(image), spans, parts, (visible > 0) & ~keep)
    none = np.zeros((0, 2), np.float32)
    return _ImageTiles(
        bounds,
        keep.sum(1),
        first + objects,
        (parts[keep] - spans[tiles][:, [0, 1, 0, 1]]).astype(np.float32),
        [cut_outlines.get(pair, none) for pair in zip(tiles.tolist(), objects.tolist(), strict=True) if outlines],
        *regions,
        int((~keep.any(0)).sum()),
    )


def _clip_regions(
    classes: NDArray[np.int32],
    boxes: NDArray[np.float32],
    spans: NDArray[np.float64],
    parts: NDArray[np.float64],
    is_ignored: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Clip r ignored regions to the tiles, and add parts of objects that become ignored, as in `_ImageTiles`.

    `parts`, (w, m, 4), are the visible parts of the objects; `is_ignored`, (w, m), selects those that become ignored.
    """
    region_parts, visible = _clip_objects(boxes, spans)
    shown = np.concatenate((visible > 0, is_ignored), 1)
    tiles, rows = np.nonzero(shown)
    found = np.concatenate((region_parts, parts), 1)[shown] - spans[tiles][:, [0, 1, 0, 1]]
    any_class = np.full(is_ignored.shape[1], -1, np.int32)
    return shown.sum(1), np.concatenate((classes, any_class))[rows], found.astype(np.float32)


def _clip_objects(
    boxes: NDArray[np.float32], spans: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Clip boxes (m, 4) to tiles (w, 4), of which the last is the whole image, in pixels of the image.

    Return the parts, (w, m, 4), and the visible fraction of each box, (w, m): 0 for a box without area.
    """
    inside = clip_boxes(boxes.astype(np.float64), (int(spans[-1, 3]), int(spans[-1, 2])))
    low = np.maximum(inside[None, :, :2], spans[:, None, :2])
    high = np.maximum(np.minimum(inside[None, :, 2:], spans[:, None, 2:]), low)
    areas = (inside[:, 2:] - inside[:, :2]).prod(1)
    visible = np.where(areas > 0, (high - low).prod(2) / np.where(areas > 0, areas, 1), 0)
    return np.concatenate((low, high), 2), visible


def _clip_polygons_to_tiles(
    outlines: Sequence[NDArray[np.float32]],
    spans: NDArray[np.float64],
    parts: NDArray[np.float64],
    visible: NDArray[np.float64],
) -> dict[tuple[int, int], NDArray[np.float32]]:
    """Clip m polygons (k, 2), in pixels of the image, to the tiles; k = 0 for an object without polygon.

    `spans`, `parts` and `visible` are as in `_clip_objects`. The last two are overwritten for objects with a polygon.
    Return (tile, object) → the clipped polygon, in pixels of the tile.
    """
    whole = _clip_polygons_to_size(outlines, spans[-1, 2:])
    areas = [_area(points) for points in whole]
    outlined = np.array(areas) > 0
    around = np.array([[*points.min(0), *points.max(0)] if len(points) else [0.0] * 4 for points in whole])
    within = np.all((around[:, :2] >= spans[:, None, :2]) & (around[:, 2:] <= spans[:, None, 2:]), axis=2)
    within[-1] = True  # the whole image, despite rounding of the clipped points
    seen = (visible > 0) & outlined
    visible[:, outlined] = 0
    pairs = np.argwhere(seen & ~within).tolist()
    moved = [whole[obj] - spans[tile, :2] for tile, obj in pairs]
    found = {}
    clipped = _clip_polygons_to_size(moved, spans[0, 2:] - spans[0, :2])  # tiles are of one size
    for (tile, obj), points in zip(pairs, clipped, strict=True):
        if len(points):
            visible[tile, obj] = _area(points) / areas[obj]
            parts[tile, obj] = np.concatenate((points.min(0), points.max(0))) + np.tile(spans[tile, :2], 2)
            found[tile, obj] = points.astype(np.float32)
    for tile, obj in np.argwhere(seen & within).tolist():
        visible[tile, obj], parts[tile, obj] = 1, around[obj]
        found[tile, obj] = (whole[obj] - spans[tile, :2]).astype(np.float32)
    return found


def _clip_polygons_to_size(outlines: Sequence[NDArray[Any]], size_wh: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Clip polygons (k, 2) to 0 … width, 0 … height."""
    if not outlines:
        return []
    owners = np.repeat(np.arange(len(outlines)), [len(points) for points in outlines])
    planes = np.array([[1, 0, 0], [0, 1, 0], [-1, 0, size_wh[0]], [0, -1, size_wh[1]]])
    points, owners = clip_polygons(np.concatenate(outlines).astype(np.float64), owners, planes)
    return np.split(points, np.cumsum(np.bincount(owners, minlength=len(outlines)))[:-1])


def _area(points: NDArray[np.float64]) -> float:
    """Return the area of a closed polygon (k, 2), by the shoelace formula."""
    x, y = points.T
    return abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
