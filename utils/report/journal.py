"""What rank 0 keeps of a run: flags, results.csv, pictures, trackers. On other ranks it does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from utils.checkpoints.folder import write_yaml
from utils.config import Hyp, TrainConfig
from utils.errors import UserError, tolerate
from utils.ranks.world import World
from utils.report.charts import plot_labels, plot_results
from utils.report.pictures import draw_targets
from utils.report.results import ResultsTable, read_results, result_columns
from utils.report.trackers.loggers import Loggers
from utils.types import Batch, DatasetIndex, Metrics

PICTURES = 3  # training batches that are drawn


class Journal:
    """The written side of a run; a context manager.

    Args:
        run: run directory, made already.
        config, hyp: written to opt.yaml and hyp.yaml.
        index: training images, for labels.jpg and the captions.
        world: only rank 0 writes.
        loss_names: of the criterion.
        start_epoch: first epoch that will be added; rows of results.csv from it on are removed.
        resumed: continue the trackers' runs, and leave the first pictures as they are; else event files that lie in
            the directory are removed.

    Raises:
        UserError: on every rank, where the run directory cannot be written to, or holds another results.csv.

    Attributes:
        run: run directory.
        draws: whether this rank draws pictures.
    """

    def __init__(
        self,
        run: Path,
        config: TrainConfig,
        hyp: Hyp,
        index: DatasetIndex,
        world: World,
        loss_names: tuple[str, ...],
        *,
        start_epoch: int = 0,
        resumed: bool = False,
    ) -> None:
        self.run, self._index, self._world, self._loss_names = run, index, world, loss_names
        self.draws = world.is_main and not config.noplots
        self._drawn = PICTURES if resumed or not self.draws else 0
        flags = {**config.as_dict(), **hyp.as_dict()}
        self._table: ResultsTable | None = None
        # The others wait on the host, not in a collective of the device, and end with rank 0 where it cannot write.
        world.from_main(lambda: self._open(config, hyp, start_epoch, resumed))
        self._loggers = Loggers(config.logger_names, run, flags, is_main=world.is_main, resume=resumed)
        if self.draws and not resumed:
            self._draw_labels()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loggers.__exit__(kind, error, traceback)

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; the first few of the run are drawn with their boxes."""
        for batch in batches:
            if self._drawn < PICTURES:
                self._draw_batch(batch)
            yield batch

    def epoch(
        self,
        epoch: int,
        *,
        losses: Iterable[float],
        metrics: Metrics | None,
        rates: Iterable[float],
        seconds: float,
        data_wait: float,
        images_per_s: float,
    ) -> None:
        """Add an epoch's row to results.csv and to the trackers.

        Args:
            epoch: from 0.
            losses: of the training, one for each of `loss_names`: means over all ranks.
            metrics: of the validation; None where there was none.
            rates: learning rates of biases, weights, norm weights.
            seconds: the whole epoch took.
            data_wait: share of the training time spent waiting for batches, 0 to 1.
            images_per_s: trained, over all ranks.

        Raises:
            UserError: on every rank, where the row cannot be written.
        """
        nan = float("nan")
        figures = (metrics.precision, metrics.recall, metrics.map50, metrics.map) if metrics else (nan,) * 4
        val_losses = metrics.losses if metrics else (nan,) * len(self._loss_names)
        cells = (epoch, *losses, *figures, *val_losses, *rates, seconds, data_wait, images_per_s)
        row = dict(zip(result_columns(self._loss_names), cells, strict=True))
        self._world.from_main(lambda: self._append(row))
        self._loggers.scalars(row, epoch)

    def finish(self, epoch: int, checkpoint: Path) -> None:
        """Draw the curves of the whole run and hand pictures and the best checkpoint to the trackers."""
        if self.draws:
            with tolerate("results.png"):
                plot_results(read_results(self.run / "results.csv"), self.run / "results.png")
            for picture in sorted(self.run.glob("*.png")) + sorted(self.run.glob("val_batch*.jpg")):
                self._loggers.image(picture.stem, picture, epoch)
        if checkpoint.is_file():
            self._loggers.checkpoint(checkpoint)

    def _open(self, config: TrainConfig, hyp: Hyp, start_epoch: int, resumed: bool) -> None:
        with self._writing():
            for folder in (self.run, self.run / "weights"):
                for torn in folder.glob(".*.tmp"):  # a file that was being written when the run was killed
                    torn.unlink()
            self._table = ResultsTable(
                self.run / "results.csv", self._loss_names, start_epoch
            )  # refuses what is no run of ours
            if not resumed:
                for events in self.run.glob("events.out.tfevents.*"):  # of the run whose place this one takes
                    events.unlink()
            write_yaml(self.run / "opt.yaml", config.as_dict())
            write_yaml(self.run / "hyp.yaml", hyp.as_dict())

    def _append(self, row: dict[str, float]) -> None:
        assert self._table is not None, "rank 0 has a table"
        with self._writing():
            self._table.append(row)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn what the file system refuses into a user's error."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"Run directory {self.run}: cannot be written to ({error.strerror or error}). Make room or mend its "
                f"permissions, and go on with --resume; or choose another with --project."
            ) from error

    def _draw_labels(self) -> None:
        with tolerate("labels.jpg"):
            plot_labels(self._index, self.run / "labels.jpg")
            self._loggers.image("labels", self.run / "labels.jpg", 0)

    def _draw_batch(self, batch: Batch) -> None:
        name = f"train_batch{self._drawn}"
        self._drawn += 1
        with tolerate(f"{name}.jpg"):
            captions = [self._index.path(i).name for i in batch.indices.tolist()]
            draw_targets(batch, self._index.names, captions, self.run / f"{name}.jpg")
            self._loggers.image(name, self.run / f"{name}.jpg", 0)
