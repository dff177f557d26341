"""Directory of a hyperparameter search: creating, resuming and joining it."""

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
from tessera.utils.files import absolute_path
from tessera.utils.ranks.launch import check_batch_size
from tessera.utils.ranks.world import World
from tessera.utils.text import shown
from tessera.utils.yaml_file import read_yaml

log = logging.getLogger(__name__)

# The journal is Optuna's; the table, the best set and the report are generated from it.
JOURNAL, TABLE, BEST, FLAGS, REPORT = "journal.log", "evolve.csv", "hyp_evolved.yaml", "opt.yaml", "search.md"
# Flags without effect on the result of a training, which may change between trainings of a search.
_FREE = frozenset(
    {
        *("evolve", "resume", "hyp", "project", "name", "exist_ok", "nosave", "noplots", "noreport", "loggers"),
        *("device", "workers", "cache", "local_rank", "profile", "compile"),
    }
)


@contextmanager
def open_search(config: TrainConfig, world: World) -> Iterator[Path]:
    """Yield the directory that `--evolve` writes to; every rank calls this.

    `--resume`, `--exist-ok` with the name of a search, or a restart by the launcher open an existing one. A new one is
    removed if the search fails before a training has ended.
    """
    earlier = world.recall("search")
    check_batch_size(config.batch_size, world.size)
    began = False
    if earlier:
        folder = Path(earlier)
    elif config.resume:
        folder = world.run_on_main(lambda: _continued(config))
        log.info(f"Continuing the search in {folder}")
    else:
        with new_run(dataclasses.replace(config, project=_project(config)), world) as folder:
            began = world.run_on_main(lambda: _begin(config, folder))
    world.remember("search", str(folder))
    try:
        yield folder
    except Exception:  # an Interrupted search can be continued
        if world.is_main and began:
            with suppress(OSError, UserError), turn(folder):
                if {path.name for path in folder.iterdir() if not path.name.startswith(".")} <= {JOURNAL, FLAGS}:
                    if not config.exist_ok:
                        shutil.rmtree(folder)
                    for name in (JOURNAL, FLAGS):
                        (folder / name).unlink(missing_ok=True)
        raise


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Exclude other workers of the search; raise UserError if the disk has no locks or cannot be written."""
    try:
        with locked(folder / ".turn"):
            yield
    except OSError as error:
        raise UserError(
            f"{folder}: the journal of the search cannot be locked, read or written ({error.strerror or error}). Free "
            "disk space, fix permissions, or choose another --project; a network disk must support locks."
        ) from error


def _begin(config: TrainConfig, folder: Path) -> bool:
    """Start a search in a directory, or join the one there; return whether this worker has started it."""
    with turn(folder):
        if not (folder / JOURNAL).is_file():
            # Ignore locks, and temporary files with which other workers test whether they can write.
            ignored = (".", tempfile.gettempprefix(), FLAGS)
            if any(not path.name.startswith(ignored) for path in folder.iterdir()):
                raise UserError(
                    f"--exist-ok: {folder} is not empty; a search needs its own directory. Give another --name, or "
                    "leave --exist-ok out."
                )
            write_flags(folder / FLAGS, config)
            (folder / JOURNAL).touch()  # after the flags, which a search with a journal must have
            return True
    _require_same_training(config, folder)
    log.info(f"Joining the search in {folder}")
    return False


def _project(config: TrainConfig) -> str:
    return config.project if config.project != TrainConfig.project else "runs/evolve"


def _continued(config: TrainConfig) -> Path:
    project = absolute_path(Path(_project(config)).expanduser())
    if config.resume == "newest":
        journals = sorted(project.glob(f"*/{JOURNAL}"), key=lambda path: path.stat().st_mtime_ns)
        if not journals:
            raise UserError(
                f"--evolve with --resume: found no {project}/*/{JOURNAL}. Give the directory of a search, --resume "
                "path/to/search, or leave --resume out to start one."
            )
        folder = journals[-1].parent
    else:
        given = absolute_path(Path(config.resume).expanduser())
        folder = given.parent if given.name in (TABLE, JOURNAL) else given
        if not (folder / JOURNAL).is_file():
            raise UserError(
                f"--resume {shown(given)}: no directory of a search, which has a {JOURNAL}. Give one of --evolve, or "
                f"leave --resume out to start a search, from the best set of another one with --hyp {BEST}."
            )
    _require_same_training(config, folder)
    return folder


def _require_same_training(config: TrainConfig, folder: Path) -> None:
    """Raise UserError for flags with which trainings of the search are not comparable, and for an empty journal."""
    before: dict[str, Any] = dict(read_yaml(folder / FLAGS, "the flags of a search").values)
    before.setdefault("metric", before.pop("objective", TrainConfig.metric))  # its name up to 0.1
    differing = [key for key, now in config.as_dict().items() if key not in _FREE and before.get(key, now) != now]
    if differing:
        had, has = (
            ", ".join(f"--{key.replace('_', '-')} {shown(values[key])}" for key in differing)
            for values in (before, config.as_dict())
        )
        raise UserError(
            f"{folder}: this search has trainings with {had}; found {has}, which are not comparable. Give the same "
            "flags, or start another search with another --name and without --resume."
        )
    if (folder / TABLE).is_file() and (folder / JOURNAL).stat().st_size == 0:
        raise UserError(
            f"{folder / JOURNAL}: empty, though {TABLE} beside it has trials. Start a search with another --name, "
            f"from the best set with --hyp {folder / BEST}."
        )
