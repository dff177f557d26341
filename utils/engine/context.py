"""What belongs to one run and stays the same while it lasts, as one thing to hand on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tessera.utils.config import Hyp, OptimizerName, TrainConfig
from tessera.utils.ranks.world import World
from tessera.utils.types import Start


@dataclass(frozen=True)
class RunContext:
    """A training run as every part of it sees it."""

    config: TrainConfig  # as given, with the recipe's file and AutoBatch's batch size where they were left open
    hyp: Hyp
    world: World
    imgsz: int  # training size in pixels, a multiple of `stride`
    stride: int  # the model's largest, in pixels
    folder: Path  # on rank 0's host
    start: Start = "scratch"
    resumed: bool = False

    @property
    def varies_sizes(self) -> bool:
        """Whether batches are of several sizes in pixels."""
        return self.config.multi_scale or self.config.rect

    @property
    def batch_size(self) -> int:
        """Images a global batch, over all ranks; below 1 until AutoBatch has chosen."""
        return self.config.batch_size

    @property
    def rank_batch_size(self) -> int:
        """Images of a global batch that fall to one rank."""
        return self.batch_size // self.world.size

    @property
    def optimizer(self) -> OptimizerName:
        """The optimizer's name."""
        return self.config.optimizer or self.hyp.optimizer

    @property
    def layer_decay(self) -> float:
        """A layer's learning rate as a part of the next one's; 1 from scratch, where all begin with nothing."""
        return self.hyp.layer_decay if self.config.weights else 1.0

    @property
    def keeps_norms(self) -> bool:
        """Whether normalisations keep the statistics that came with the weights."""
        return bool(self.config.weights and self.hyp.fixed_norms)

    @property
    def mosaic_epochs(self) -> int:
        """Epochs, from the first, that may have mosaic and mixup."""
        config, hyp = self.config, self.hyp
        if config.rect or hyp.mosaic == 0:
            return 0
        closed = config.close_mosaic if config.close_mosaic >= 0 else round(hyp.close_mosaic * config.epochs)
        return config.epochs - closed
