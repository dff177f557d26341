"""When and where the checkpoints of a run are written, by rank 0 alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from models.detector import DetectionModel
from utils.checkpoints.description import git_revision, run_facts
from utils.checkpoints.format import save_checkpoint
from utils.checkpoints.state import dump_state
from utils.config import Hyp, TrainConfig
from utils.engine.state import TrainState
from utils.errors import Interrupted
from utils.ranks.signals import Interruption
from utils.ranks.world import World


class Saver:
    """Writes last.pt, best.pt and epochN.pt; an error there reaches every rank.

    Attributes:
        folder: where they lie, on rank 0's host.
        best: best.pt where the best epoch was saved, else last.pt.
        settle: brings the state up to the last step; called before it is saved.
    """

    def __init__(
        self,
        run: Path,
        state: TrainState[DetectionModel],
        config: TrainConfig,
        hyp: Hyp,
        dataset_hash: str,
        world: World,
        interruption: Interruption,
        *,
        settle: Callable[[], None],
        has_best: bool = False,
    ) -> None:
        self.folder, self.settle = run / "weights", settle
        self.best = self.folder / ("best.pt" if has_best else "last.pt")
        self._state, self._world, self._interruption = state, world, interruption
        self._epoch_period, self._step_period = config.save_period, config.save_steps
        self._config, self._hyp, self._dataset_hash = config.as_dict(), hyp.as_dict(), dataset_hash
        self._git = git_revision() if world.is_main else None

    def after_step(self, stop: bool) -> None:
        """Save in the middle of an epoch where it is time to, or where a rank was asked to stop.

        Raises:
            Interrupted: on every rank, once the checkpoint is written.
        """
        progress = self._state.progress
        if stop or due(progress.step, self._step_period):
            self._save(["last.pt"])
        if stop:
            self._leave(f"epoch {progress.epoch} after batch {progress.step_in_epoch}")

    def after_epoch(self, epoch: int, *, wanted: bool, is_best: bool, done: bool) -> None:
        """Save after `epoch`: last.pt; best.pt too where it is the best; epochN.pt where one is due.

        Args:
            epoch: from 0.
            wanted: False under --nosave, except after the last epoch.
            is_best: of all epochs so far.
            done: the training ends here anyway.

        Raises:
            Interrupted: on every rank, where one was asked to stop and there is something left to train.
        """
        stop = any(self._world.all_gather(self._interruption.requested)) and not done
        if not (wanted or stop):
            return
        names = ["last.pt"]
        if is_best:
            names.insert(0, "best.pt")
            self.best = self.folder / "best.pt"
        if due(epoch + 1, self._epoch_period):
            names.insert(0, f"epoch{epoch}.pt")
        self._save(names)
        if stop:
            self._leave(f"the end of epoch {epoch}")

    def _save(self, names: Iterable[str]) -> None:
        self._world.doing("saving a checkpoint")
        self.settle()
        losses = self._world.all_gather(self._state.progress.losses.cpu())

        def write() -> None:
            facts = run_facts(self._state.model, self._config, self._hyp, self._dataset_hash, self._git)
            content = {**dump_state(self._state, losses), **facts}
            for name in names:
                save_checkpoint(self.folder / name, content)
            self._world.remember("saved", "yes")

        self._world.from_main(write)
        self._world.doing("training")

    def _leave(self, where: str) -> None:
        last = self.folder / "last.pt"
        message = f"Stopped as asked in {where}. Go on with: train.py --resume {last}"
        raise Interrupted(message, self._interruption.requested)


def due(count: int, period: int) -> bool:
    """Whether something that happens every `period` is due after `count`; never with a period below 1."""
    return period > 0 and count % period == 0
