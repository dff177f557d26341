"""Immutable context of a training run: configuration, hyperparameters, ranks, sizes, run directory; and its dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.image_size import ImageSize, size_hw_of
from tessera.utils.ranks.world import World
from tessera.utils.types import DatasetIndex, DatasetSpec, Pretraining


@dataclass(frozen=True)
class RunContext:
    """Context of one training run, resolved and valid."""

    config: TrainConfig  # flags, completed by the recipe's file and AutoBatch's batch size
    hyp: Hyp
    world: World
    imgsz: ImageSize  # training size in pixels, multiples of `stride`
    stride: int  # largest of the model, in pixels
    folder: Path  # run directory, on rank 0's host
    pretraining: Pretraining = "scratch"
    resumed: bool = False

    @property
    def longer_side(self) -> int:
        """The longer side of `imgsz`."""
        return max(size_hw_of(self.imgsz))

    @property
    def val_batch_size(self) -> int:
        """Images in a rank's validation batch: without gradients twice as many fit; with --tile they take long."""
        return 1 if self.config.tile else 2 * self.rank_batch_size

    @property
    def varies_sizes(self) -> bool:
        """Whether the image size differs between batches."""
        return self.config.multi_scale or self.config.rect

    @property
    def batch_size(self) -> int:
        """Images of a global batch, over all ranks."""
        return self.config.batch_size

    @property
    def rank_batch_size(self) -> int:
        """Images of a global batch on each rank."""
        return self.batch_size // self.world.size

    @property
    def optimizer(self) -> str:
        """Name of the optimizer: `--optimizer`, else the hyperparameters'."""
        return self.config.optimizer or self.hyp.optimizer

    @property
    def layer_decay(self) -> float:
        """Ratio of a layer's learning rate to the next layer's; 1 from scratch."""
        return self.hyp.layer_decay if self.config.weights else 1.0

    @property
    def mosaic_epochs(self) -> int:
        """Number of epochs, from the first, with mosaic and mixup."""
        config, hyp = self.config, self.hyp
        if config.rect or hyp.mosaic == 0:
            return 0
        closed = config.close_mosaic if config.close_mosaic >= 0 else round(hyp.close_mosaic * config.epochs)
        return config.epochs - closed


@dataclass(frozen=True)
class TrainingData:
    """Dataset of a training."""

    spec: DatasetSpec
    images: DatasetIndex  # training split
    train: DatasetIndex  # samples: the same, or with `--tile` its tiles
    val: DatasetIndex
    images_per_epoch: int  # number of samples in an epoch
    train_hash: str  # digest of `train`, to detect other data in a resumed run
