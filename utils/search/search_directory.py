"""The folder of a search for hyperparameters: a new one, or that of a search which is continued or joined."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tessera.data.source.download import locked
from tessera.utils.checkpoints.run_directory import new_run, write_flags
from tessera.utils.config import TrainConfig
from tessera.utils.errors import UserError
from tessera.utils.ranks.launch import check_batch_size
from tessera.utils.ranks.world import World
from tessera.utils.text import shown
from tessera.utils.yaml_file import read_yaml

log = logging.getLogger(__name__)

# The journal is Optuna's, and the search itself; the others are made from it.
JOURNAL, TABLE, BEST, FLAGS, REPORT = "journal.log", "evolve.csv", "hyp_evolved.yaml", "opt.yaml", "search.md"
# Flags that may change between the trainings of a search: they say where it runs, not what a training is worth.
_FREE = frozenset(
    {
        *("evolve", "resume", "hyp", "project", "name", "exist_ok", "nosave", "noplots", "noreport", "loggers"),
        *("device", "workers", "cache", "local_rank", "profile", "compile"),
    }
)


@contextmanager
def open_search(config: TrainConfig, world: World) -> Iterator[Path]:
    """The folder that `--evolve` writes to; every rank calls this.

    It is that of a search which `--resume` continues, which `--exist-ok` finds under its name, or which the launcher
    has restarted the ranks of; else a new one, removed again where the search fails before a training has ended.

    Raises:
        UserError: `--resume` means no search, or one with trainings of another kind; the folder exists and holds
            something else, with `--exist-ok`; it cannot be made.
    """
    earlier = world.recall("search")
    check_batch_size(config.batch_size, world.size)  # a resumed training may bring another, a search does not
    began = False
    if earlier:
        folder = Path(earlier)
    elif config.resume:
        folder = world.from_main(lambda: _continued(config))
        log.info(f"Continuing the search in {folder}")
    else:
        with new_run(dataclasses.replace(config, project=_project(config)), world) as folder:
            began = world.from_main(lambda: _begin(config, folder))
        # From here on other workers may join it: its journal has a lock of its own.
    world.remember("search", str(folder))
    try:
        yield folder
    except Exception:  # not where it was stopped: it can be continued
        if world.is_main and began:
            with suppress(OSError, UserError), turn(folder):
                _forget(folder, keeps_folder=config.exist_ok)
        raise


def _forget(folder: Path, *, keeps_folder: bool) -> None:
    """Remove a search in which no worker has a training, or has ended one."""
    if {path.name for path in folder.iterdir() if not path.name.startswith(".")} <= {JOURNAL, FLAGS}:
        if not keeps_folder:
            shutil.rmtree(folder)
        for name in (JOURNAL, FLAGS):
            (folder / name).unlink(missing_ok=True)


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """While inside, no other worker of the search decides or writes anything.

    Raises:
        UserError: the disk has no locks, or cannot be written.
    """
    try:
        with locked(folder / ".turn"):
            yield
    except OSError as error:
        raise UserError(
            f"{folder}: the journal of the search cannot be locked, read or written ({error.strerror or error}). Make "
            "room or fix its permissions, or choose another place with --project; on a network's disk, one with locks."
        ) from error


def _begin(config: TrainConfig, folder: Path) -> bool:
    """Make a folder that of a search, or join it; return whether this worker has begun it."""
    with turn(folder):
        if not (folder / JOURNAL).is_file():
            # Hidden files are locks; some disks show for a moment what other workers write to see whether they can.
            ignored = (".", tempfile.gettempprefix(), FLAGS)
            if any(not path.name.startswith(ignored) for path in folder.iterdir()):
                raise UserError(
                    f"--exist-ok: {folder} is not empty, and a search writes to a folder of its own. Give another "
                    "--name, or leave --exist-ok out."
                )
            write_flags(folder / FLAGS, config)
            (folder / JOURNAL).touch()  # whoever finds it finds the flags
            return True
    _require_same_training(config, folder)
    log.info(f"Joining the search in {folder}")
    return False


def _project(config: TrainConfig) -> str:
    return config.project if config.project != TrainConfig.project else "runs/evolve"


def _continued(config: TrainConfig) -> Path:
    project = Path(_project(config)).expanduser().absolute()
    if config.resume == "newest":
        journals = sorted(project.glob(f"*/{JOURNAL}"), key=lambda path: path.stat().st_mtime_ns)
        if not journals:
            raise UserError(
                f"--evolve with --resume: found no search, looked for {project}/*/{JOURNAL}. Name its folder, --resume "
                "path/to/folder, or leave --resume out to begin one."
            )
        folder = journals[-1].parent
    else:
        given = Path(config.resume).expanduser().absolute()
        folder = given.parent if given.name in (TABLE, JOURNAL) else given
        if not (folder / JOURNAL).is_file():
            raise UserError(
                f"--resume {shown(given)}: not the folder of a search, which has a {JOURNAL}. Name one that --evolve "
                f"has written, or leave --resume out to begin a search; --hyp {BEST} begins it with the best set of "
                "another."
            )
    _require_same_training(config, folder)
    return folder


def _require_same_training(config: TrainConfig, folder: Path) -> None:
    """Refuse flags with which a training would not compare with those of the table, and a search that is lost.

    Raises:
        UserError: names all that differ.
    """
    before: dict[str, Any] = read_yaml(folder / FLAGS, "the flags of a search").values
    differing = [key for key, now in config.as_dict().items() if key not in _FREE and before.get(key, now) != now]
    if differing:
        had, has = (
            ", ".join(f"--{key.replace('_', '-')} {shown(values[key])}" for key in differing)
            for values in (before, config.as_dict())
        )
        raise UserError(
            f"{folder}: the trainings of this search had {had}, now there is {has}: they could not be compared. Give "
            "the same flags, or begin another search under another --name, without --resume."
        )
    if (folder / TABLE).is_file() and (folder / JOURNAL).stat().st_size == 0:
        raise UserError(
            f"{folder / JOURNAL}: empty, though {TABLE} beside it has trials: the search is lost. Begin another one "
            f"under another --name; --hyp {folder / BEST} begins it with the best set so far."
        )
