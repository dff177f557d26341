"""When and where the checkpoints of a run are written, by rank 0 alone."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor

from models.detector import DetectionModel
from utils.checkpoints.description import describe_run, git_revision
from utils.checkpoints.format import copy_checkpoint, save_checkpoint
from utils.checkpoints.state import dump_state
from utils.engine.context import RunContext
from utils.engine.state import TrainState
from utils.errors import Interrupted
from utils.machine.accelerator import Accelerator
from utils.ranks.signals import Interruption

log = logging.getLogger(__name__)


class Saver:
    """Writes last.pt, best.pt and epochN.pt; a context manager that waits for the last file.

    After an epoch the state is copied to the host, and a thread of rank 0 writes the copy while the next epoch is
    trained. The next save waits for it, and so does the end of that epoch's steps: no process may be forked during a
    write, for it would hold the unfinished file open. A write that fails is an error on every rank, at the next of
    these moments. `--save-steps` and a stop wait for their file: what they save outlives a kill in the next step. Where
    the write before failed, they warn of that, write theirs, and then what is still missing, such as best.pt: the disk
    may have room again.

    Args:
        context: of the run.
        state: what is saved.
        dataset_hash: digest of the training index.
        interruption: whether this rank was asked to stop.
        settle: brings the state up to the last step; returns whether a rank was asked to stop by then.
        has_best: whether the run has a best.pt already.

    Attributes:
        folder: where the files lie, on rank 0's host.
        best: best.pt where the best epoch was saved, else last.pt.
    """

    def __init__(
        self,
        context: RunContext,
        state: TrainState[DetectionModel],
        dataset_hash: str,
        interruption: Interruption,
        *,
        settle: Callable[[], bool],
        has_best: bool = False,
    ) -> None:
        self.folder = context.folder / "weights"
        self.best = self.folder / ("best.pt" if has_best else "last.pt")
        self._context, self._state, self._dataset_hash = context, state, dataset_hash
        self._interruption, self._settle_state = interruption, settle
        self._git = git_revision() if context.world.is_main else None
        # One thread for all writes: CPython before 3.12 must not fork while a thread begins or ends.
        self._thread = ThreadPoolExecutor(1, "checkpoint writer")
        self._writing: _Writing | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        self._failed_write()

    def settle(self) -> None:
        """Bring the state up to the last step, and wait for the file that is being written; every rank.

        Raises:
            UserError: on every rank, where that file could not be written.
        """
        self._settle_state()
        self._context.world.from_main(self._finish_writing)

    def after_step(self, stop: bool) -> None:
        """Save in the middle of an epoch where it is time to, or where a rank was asked to stop.

        Raises:
            UserError: on every rank, where the file could not be written.
            Interrupted: on every rank, once the checkpoint is written.
        """
        progress = self._state.progress
        if stop or due(progress.step, self._context.config.save_steps):
            # On a device with a queue, a save each step reads all flags itself.
            stop = self._save(["last.pt"], wait=True) or stop
        if stop:
            self._interrupt(f"epoch {progress.epoch} after batch {progress.step_in_epoch}")

    def after_epoch(self, epoch: int, *, save: bool, is_best: bool, done: bool) -> None:
        """Save after `epoch`: last.pt; best.pt too where it is the best; epochN.pt where one is due.

        Args:
            epoch: from 0.
            save: False under --nosave, except after the last epoch.
            is_best: of all epochs so far.
            done: the training ends here anyway; the files are written on return.

        Raises:
            UserError: on every rank, where the file of the epoch before could not be written.
            Interrupted: on every rank, where one was asked to stop and there is something left to train.
        """
        stop = any(self._context.world.all_gather(self._interruption.requested)) and not done
        if not (save or stop):
            return
        names = ["last.pt"]  # the newest, which a bare --resume looks for, is written last
        if is_best:
            names.insert(0, "best.pt")
            self.best = self.folder / "best.pt"
        if due(epoch + 1, self._context.config.save_period):
            names.insert(0, f"epoch{epoch}.pt")
        self._save(names, wait=stop or done)
        if stop:
            self._interrupt(f"the end of epoch {epoch}")

    def _save(self, names: Sequence[str], *, wait: bool) -> bool:
        """Save the state of the last step; returns whether a rank was asked to stop by then."""
        world = self._context.world
        world.set_activity("saving a checkpoint")
        stop = self._settle_state()
        losses = world.all_gather(self._state.progress.losses.cpu())

        def write() -> None:
            if wait:
                failed = self._failed_write()
                self._write(names, self._content(losses))
                if failed and (missing := [name for name in failed.names if name not in names]):
                    self._write(missing, failed.content)
            else:
                self._finish_writing()
                content = snapshot(self._content(losses), world.accelerator)
                self._writing = _Writing(names, content, self._thread.submit(self._write, names, content))

        world.from_main(write)
        world.set_activity("training")
        return stop

    def _content(self, losses: Sequence[Tensor]) -> dict[str, Any]:
        """A whole checkpoint, of live tensors."""
        config, hyp = self._context.config.as_dict(), self._context.hyp.as_dict()
        description = describe_run(self._state.model, config, hyp, self._dataset_hash, self._git)
        return {**dump_state(self._state, losses), **description}

    def _write(self, names: Sequence[str], content: Mapping[str, Any]) -> None:
        """Write the content once, and copy the file to the other names."""
        first, *others = (self.folder / name for name in names)
        save_checkpoint(first, content)
        for path in others:
            copy_checkpoint(first, path)
        self._context.world.remember("saved", "yes")

    def _finish_writing(self) -> None:
        """Wait for the file that is being written, and raise what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.done.result()

    def _failed_write(self) -> _Writing | None:
        """Wait for the file that is being written; where that went wrong, warn of it and return what was to be done."""
        writing, self._writing = self._writing, None
        failure = writing.done.exception() if writing is not None else None
        if failure is None:
            return None
        log.warning(f"The last checkpoint was not written: {failure}")
        return writing

    def _interrupt(self, where: str) -> None:
        last = self.folder / "last.pt"
        message = f"Stopped as asked in {where}. Resume with: train.py --resume {last}"
        raise Interrupted(message, self._interruption.requested, saved=True)


class _Writing(NamedTuple):
    """A write in the background: under which names, what, and its end."""

    names: Sequence[str]
    content: Mapping[str, Any]
    done: Future[None]


def snapshot(value: Any, accelerator: Accelerator) -> Any:
    """A copy of `value` on the host that training does not change: tensors, and the containers that they lie in.

    The host waits for the device once, for all of them.
    """
    copied = _copy_to_host(value, accelerator)
    accelerator.synchronize()
    return copied


def _copy_to_host(value: Any, accelerator: Accelerator) -> Any:
    if isinstance(value, Tensor):
        return accelerator.to_host(value)
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value)  # a state_dict keeps its kind, and the versions of its modules
        for key in copied:
            copied[key] = _copy_to_host(copied[key], accelerator)
        return copied
    return type(value)(_copy_to_host(x, accelerator) for x in value) if type(value) in (list, tuple) else value


def due(count: int, period: int) -> bool:
    """Whether something that happens every `period` is due after `count`; never with a period below 1."""
    return period > 0 and count % period == 0
