"""Writer of last.pt, best.pt and epochN.pt: when each is due; rank 0 writes, during training in a thread."""

from __future__ import annotations

import copy
import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.utils.bit_depth import PixelRule
from tessera.utils.checkpoints.format import WEIGHTS_KEYS, describe_metrics, describe_run, save_checkpoint
from tessera.utils.checkpoints.resume import dump_state
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.state import TrainState
from tessera.utils.engine.step import StepFlags
from tessera.utils.errors import Interrupted
from tessera.utils.flags.program import git_revision, started
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.failures import StopSignals
from tessera.utils.types import Metrics

log = logging.getLogger(__name__)

_Files = dict[str, Mapping[str, Any]]  # content of each file by name


class Saver(AbstractContextManager["Saver"]):
    """Writer of last.pt, best.pt and epochN.pt; a context manager that waits for the last file.

    | moment | files | written |
    |---|---|---|
    | end of an epoch's steps | last.pt; a run resumed from it begins with the validation | during the validation |
    | initial weights are validated | best.pt | before the first step |
    | end of an epoch's validation | best.pt if it is the best, epochN.pt if it is due | during the next epoch |
    | `--save-steps` is due | last.pt | during the next steps |
    | stop signal | last.pt | before the end |
    | end of the run | last.pt, and best.pt if the last epoch is the best | before the end |

    A kill costs at most the steps and the validation since the last file.

    A thread of rank 0 writes files during the training from a copy on the host. Every save and the end of an epoch's
    steps wait for the write before, as a process forked during a write would hold the unfinished file open. A failed
    write raises UserError on every rank. Only a stop warns instead, writes its own file and then what is missing, as
    the disk may have space again.

    Every rank calls every method.

    Args:
        context, state: of the run.
        dataset_hash: digest of the training index.
        pixels: the dataset's conversion of images with more than 8 bits.
        stop_signals: stop signals of this rank.
        flush: reads the remaining step flags.
    """

    def __init__(
        self,
        context: RunContext,
        state: TrainState[DetectionModel],
        dataset_hash: str,
        pixels: PixelRule | None,
        stop_signals: StopSignals,
        flush: Callable[[], StepFlags],
    ) -> None:
        self.folder = context.folder / "weights"  # on rank 0's host
        has_best = context.resumed and context.world.run_on_main((self.folder / "best.pt").is_file)
        self.best = self.folder / ("best.pt" if has_best else "last.pt")  # the first, once a best epoch was saved
        self._last = self.folder / "last.pt"
        self._saved, self._begun = False, False  # last.pt of this run: is complete; may be, on rank 0's host
        of_head = set(state.model.head.modules()) if context.config.head else set()  # which --head names
        own = [type(m) for m in state.model.modules() if m not in of_head and not _is_known(type(m))]
        self._own_class = min((kind.__name__ for kind in own), default="")
        self._context, self._state, self._dataset_hash, self._pixels = context, state, dataset_hash, pixels
        self._stop_signals, self._flush_steps = stop_signals, flush
        self._git = git_revision() if context.world.is_main else None
        # One thread for all writes: CPython before 3.12 must not fork while a thread starts or ends.
        self._thread = ThreadPoolExecutor(1, "checkpoint writer")
        self._writing: tuple[_Files, Future[None]] | None = None

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=True)
        self._finish_writing(raises=False)

    def resume_line(self) -> str:
        """Return a line that says how to resume; "" as long as there is no checkpoint of this run."""
        path = self._context.config.resume if self._context.resumed else ""
        if self._saved or (self._begun and self._last.is_file()):
            path = str(self._last)
        if path and self._own_class:
            return f"Resume with tessera.train(resume={path!r}) in the program that defines {self._own_class}."
        own_parts = self._context.config.own_part_flags()
        return f"Resume with: {started('train.py')} --resume {shlex.quote(path)}{own_parts}" if path else ""

    def flush(self) -> None:
        """Flush the step flags, and wait for the file that is being written."""
        self._flush_steps()
        self._run_on_main(self._finish_writing)

    def after_step(self, stop: bool) -> None:
        """Save within an epoch if it is due or a stop was requested.

        Raises:
            Interrupted: after the checkpoint is written, if a stop was requested.
        """
        progress = self._state.progress
        if stop or due(progress.step, self._context.config.save_steps):
            stop = self._flush_steps().stop or stop  # on a device with a queue, of this step
            self._save(["last.pt"], wait=stop)
        if stop:
            self._interrupt(f"epoch {progress.epoch} after batch {progress.batch_in_epoch}")

    def before_validation(self) -> None:
        """Start to save last.pt after an epoch's steps, unless --nosave."""
        if not self._context.config.nosave:
            self._save(["last.pt"], wait=False)

    def stop_validation(self) -> NoReturn:
        """Save last.pt, from which a resumed run repeats the validation; then raise Interrupted."""
        self._save(["last.pt"], wait=True)
        self._interrupt(f"the validation of epoch {self._state.progress.epoch}")

    def before_training(self, metrics: Metrics) -> None:
        """Save the initial weights and their metrics as best.pt."""
        self.best = self.folder / "best.pt"
        self._save([], metrics, is_best=True, wait=True)

    def after_epoch(self, epoch: int, metrics: Metrics | None, *, is_best: bool, stop: bool) -> None:
        """Save what is due after the validation of `epoch`; with --nosave only after the last epoch.

        Args:
            epoch: from 0.
            metrics: None if it was not validated; last.pt is then due here.
            is_best: of all epochs so far.
            stop: the training ends early here.

        Raises:
            Interrupted: a stop was requested, and there is something left to train.
        """
        config = self._context.config
        done = stop or epoch + 1 == config.epochs
        interrupted = any(self._context.world.all_gather(self._stop_signals.requested)) and not done
        if config.nosave and not (interrupted or done):
            return
        if is_best or config.nosave:
            self.best = self.folder / ("best.pt" if is_best else "last.pt")
        ends = interrupted or done
        names = []
        if due(epoch + 1, config.save_period):
            names.append(f"epoch{epoch}.pt")
        if ends or metrics is None:
            names.append("last.pt")
        if names or is_best:
            self._save(names, metrics, is_best=is_best, wait=ends)
        if interrupted:
            self._interrupt(f"the end of epoch {epoch}")

    def _save(self, names: Sequence[str], metrics: Metrics | None = None, *, is_best: bool = False, wait: bool) -> None:
        """Save complete checkpoints called `names`, and best.pt.

        With `wait` the files are written on return, and those whose last write failed.
        """
        world = self._context.world
        world.set_activity("saving a checkpoint")
        self._flush_steps()
        losses = world.all_gather(self._state.progress.losses.cpu())

        def write() -> None:
            content = self._content(losses, metrics)
            failed = self._finish_writing(raises=not wait)
            if not names:
                content = _weights(content)  # of best.pt alone
            if not (wait and world.accelerator.is_host):  # a file names no device
                content = snapshot(content, world.accelerator)
            files: _Files = {"best.pt": _weights(content)} if is_best else {}
            files.update(dict.fromkeys(names, content))
            if not wait:
                self._writing = files, self._thread.submit(self._write, files)
                return
            self._write(files)
            self._write({name: earlier for name, earlier in failed.items() if name not in files})

        self._run_on_main(write)
        self._begun = not world.is_main and (self._begun or "last.pt" in names)
        world.set_activity("training")

    def _run_on_main(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0; then every rank knows whether last.pt is saved."""

        def run() -> bool:
            work()
            return self._saved

        if self._context.world.run_on_main(run):  # assigned only then: the thread may set it meanwhile
            self._saved = True

    def _content(self, losses: Sequence[Tensor], metrics: Metrics | None) -> dict[str, Any]:
        context = self._context
        config, hyp = context.config.as_dict(), context.hyp.as_dict()
        description = describe_run(
            self._state.model, config, hyp, context.imgsz, self._dataset_hash, self._git, self._pixels
        )
        return {**dump_state(self._state, losses), **describe_metrics(metrics), **description}

    def _write(self, files: _Files) -> None:
        for name, content in files.items():
            save_checkpoint(self.folder / name, content)
        if "last.pt" in files:
            self._saved = True
            self._context.world.remember("saved", "yes")

    def _finish_writing(self, *, raises: bool = True) -> _Files:
        """Wait for the files being written. After a failure raise it, or warn and return these files."""
        writing, self._writing = self._writing, None
        if writing is None:
            return {}
        files, done = writing
        failure = done.exception()
        if failure is None:
            return {}
        if raises:
            raise failure
        log.warning(f"The last checkpoint was not written: {failure}")
        return files

    def _interrupt(self, where: str) -> NoReturn:
        number = self._stop_signals.take(self._context.world.all_gather(self._stop_signals.requested))
        raise Interrupted(f"Stopped as requested in {where}.", number, saved=True)


def _is_known(kind: type) -> bool:
    """Return whether a program that imports nothing but this package knows a class."""
    return kind.__module__.partition(".")[0] in ("tessera", "torch", "torchvision")


def _weights(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: content[key] for key in WEIGHTS_KEYS}


def snapshot(value: Any, accelerator: Accelerator) -> Any:
    """Copy tensors and their containers to the host, with one wait for the device."""
    copied = _copy_to_host(value, accelerator)
    accelerator.synchronize()
    return copied


def _copy_to_host(value: Any, accelerator: Accelerator) -> Any:
    if isinstance(value, Tensor):
        return accelerator.to_host(value)
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value)  # keeps the type and the metadata of a state_dict
        for key in copied:
            copied[key] = _copy_to_host(copied[key], accelerator)
        return copied
    return type(value)(_copy_to_host(x, accelerator) for x in value) if type(value) in (list, tuple) else value


def due(count: int, period: int) -> bool:
    """Return whether something with this period is due after `count`; never with a period below 1."""
    return period > 0 and count % period == 0
