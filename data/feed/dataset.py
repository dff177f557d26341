"""Datasets that build whole batches: each image is written directly into its row of the batch tensor.

Legend: B images of this rank's batch, T objects of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from tessera.data.augment.geometry import append_regions
from tessera.data.augment.pipeline import Placement, letterbox, train_sample
from tessera.data.augment.transforms import OwnTransform
from tessera.data.feed.decoded_cache import DecodedCache
from tessera.data.feed.image_store import ImageStore
from tessera.data.source.decode import UndecodableImage
from tessera.utils.config import Hyp
from tessera.utils.errors import UserError
from tessera.utils.seeding import sample_rng
from tessera.utils.types import FILL, Batch, DatasetIndex, Draw, Sample

_NOT_INVERTIBLE = (math.nan,) * 4


class DetectionDataset(Dataset[Batch]):
    """Images and labels of an index at loading size, indexed by a whole batch of `Draw`s."""

    def __init__(self, index: DatasetIndex, store: ImageStore | DecodedCache) -> None:
        self.index, self.store = index, store
        # Of the current batch, see Batch.
        self._undecodable: dict[int, str] = {}
        self._loaded: set[int] = set()

    def __len__(self) -> int:
        return len(self.index)

    def sample(self, index: int) -> Sample:
        """Return image `index` as loaded, with boxes and polygons in its pixels. The image may be read-only.

        An image that does not decode becomes grey without objects. The stream of samples then depends on the files
        alone, and is the same on every rank and after every resume.
        """
        file = self.store.of_file(index).start
        self._loaded.add(file)
        try:
            image = self.store.load(index)
        except UndecodableImage as error:
            self._undecodable[file] = str(error)
            return Sample(
                np.full((*self.store.size(index), 3), FILL, np.uint8),
                np.zeros((0, 4), np.float32),
                np.zeros(0, np.int32),
            )
        classes, boxes_xyxy = self.index.labels(index)
        scale_xy = self._loading_scale(index, image).astype(np.float32)
        segments = self.index.segments(index)
        sample = Sample(image, boxes_xyxy * np.tile(scale_xy, 2), classes, [points * scale_xy for points in segments])
        _, regions_xyxy = self.index.ignored(index)
        regions_xyxy = regions_xyxy * np.tile(scale_xy, 2)
        classes_of = np.full(len(regions_xyxy), -1, np.int32)
        if (row := self.index.unlabelled_set(index)) >= 0:
            whole = np.array([[0, 0, image.shape[1], image.shape[0]]], np.float32)
            regions_xyxy, classes_of = np.concatenate((regions_xyxy, whole)), np.append(classes_of, np.int32(-2 - row))
        sample = append_regions(sample, regions_xyxy, classes_of) if len(regions_xyxy) else sample
        if len(self.index.label_weights):
            start, end = self.index.box_offsets[index : index + 2]
            sample.weights = np.append(self.index.label_weights[start:end], np.ones(len(regions_xyxy), np.float32))
        return sample

    def __getitems__(self, draws: Sequence[Draw]) -> Batch | UserError:
        """Build the batch of `draws`, which have one shape. A `UserError` is returned, for the rank to raise."""
        try:
            return self._build(draws)
        except UserError as error:
            # Raised here, it would reach the rank as another exception, with a worker's traceback in its message.
            return error

    def _build(self, draws: Sequence[Draw]) -> Batch:
        height, width = draws[0].size_hw if draws else (0, 0)
        assert all(draw.size_hw == (height, width) for draw in draws), draws
        self._undecodable, self._loaded = {}, set()
        images = _empty_images(len(draws), height, width)
        placements = np.empty((len(draws), 4))
        rows, weights = [np.zeros((0, 6), np.float32)], [np.zeros(0, np.float32)]
        for i, (draw, out) in enumerate(zip(draws, images.numpy(), strict=True)):
            sample, placements[i] = self._render(draw, out)
            rows.append(np.empty((len(sample.classes), 6), np.float32))
            rows[-1][:, 0], rows[-1][:, 1], rows[-1][:, 2:] = i, sample.classes, sample.boxes_xyxy
            weights.append(sample.all_weights())
        indices = np.array([draw.index for draw in draws], np.int64)
        targets = np.concatenate(rows)
        if len(self.index.label_weights):
            targets = np.column_stack((targets, np.concatenate(weights)))
        return Batch(
            images,
            torch.from_numpy(targets),
            torch.from_numpy(indices),
            torch.from_numpy(self.index.sizes_hw[indices].astype(np.int64)),
            torch.from_numpy(placements),
            self._undecodable,
            self._number_sets(targets),
            self._loaded,
        )

    def _number_sets(self, targets: NDArray[np.float32]) -> Tensor | None:
        """Replace the rows of `DatasetIndex.unlabelled_sets` in targets by those of `Batch.unlabelled`; return that."""
        if not len(self.index.set_of_image):
            return None
        regions = targets[:, 1] < -1
        used, numbers = np.unique(-2 - targets[regions, 1].astype(np.int64), return_inverse=True)
        targets[regions, 1] = -2 - numbers
        return torch.from_numpy(self.index.unlabelled_sets[used])

    def _render(self, draw: Draw, out: NDArray[np.uint8]) -> tuple[Sample, Placement]:
        """Write the image of `draw` into `out`; return the sample, and its placement from the original image."""
        raise NotImplementedError

    def _loading_scale(self, index: int, image: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Return loaded / original width and height: float64 (2,)."""
        height, width = self.index.sizes_hw[index].tolist()
        return np.array([image.shape[1] / width, image.shape[0] / height])


class TrainDataset(DetectionDataset):
    """Augmented samples, each a pure function of (seed, epoch, position); no mosaic from epoch `mosaic_epochs` on."""

    def __init__(
        self,
        index: DatasetIndex,
        store: ImageStore | DecodedCache,
        hyp: Hyp,
        seed: int,
        mosaic_epochs: int,
        transforms: Sequence[OwnTransform] = (),
    ) -> None:
        super().__init__(index, store)
        self.seed, self.mosaic_epochs, self._transforms = seed, mosaic_epochs, transforms
        self._hyp, self._hyp_without_mosaic = hyp, replace(hyp, mosaic=0.0)

    def _render(self, draw: Draw, out: NDArray[np.uint8]) -> tuple[Sample, Placement]:
        rng = sample_rng(self.seed, draw.epoch, draw.position)
        hyp = self._hyp if draw.epoch < self.mosaic_epochs else self._hyp_without_mosaic
        with self.store.near(draw):
            sample = train_sample(draw, self.sample, hyp, rng, out, self._transforms, self.seed, len(self.index.names))
        return sample, _NOT_INVERTIBLE


class ValDataset(DetectionDataset):
    """Letterboxed samples, with the placement that maps boxes back to the original image.

    Images that do not decode are removed from the batch, and do not count in the metrics.
    """

    def _build(self, draws: Sequence[Draw]) -> Batch:
        batch = super()._build(draws)
        if not batch.undecodable:
            return batch
        left = self._build([draw for draw in draws if draw.index not in batch.undecodable])
        return replace(left, undecodable={**left.undecodable, **batch.undecodable}, loaded=batch.loaded)

    def _render(self, draw: Draw, out: NDArray[np.uint8]) -> tuple[Sample, Placement]:
        with self.store.near(draw):
            loaded = self.sample(draw.index)
            placed, (scale_x, scale_y, left, top) = letterbox(loaded, draw.size_hw, out)
        loading_x, loading_y = self._loading_scale(draw.index, loaded.image).tolist()
        return placed, (scale_x * loading_x, scale_y * loading_y, left, top)


def _empty_images(count: int, height: int, width: int) -> Tensor:
    """Return uninitialised uint8 (count, height, width, 3); in a worker in shared memory, which spares torch a copy."""
    shape = (count, height, width, 3)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
