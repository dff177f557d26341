"""The folder of a search for hyperparameters: a new one, or that of the search which `--resume` continues."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tessera.utils.checkpoints.folder import new_run
from tessera.utils.config import TrainConfig
from tessera.utils.errors import UserError
from tessera.utils.ranks.launch import check_batch_size
from tessera.utils.ranks.world import World
from tessera.utils.text import shown
from tessera.utils.yaml_file import read_yaml

log = logging.getLogger(__name__)

TABLE, BEST, FLAGS = "evolve.csv", "hyp_evolved.yaml", "opt.yaml"
# Flags that may change between the trainings of a search: they say where it runs, not what a training is worth.
_FREE = frozenset(
    {
        *("evolve", "resume", "hyp", "project", "name", "exist_ok", "nosave", "noval", "noplots", "noreport"),
        *("loggers", "device", "workers", "cache", "local_rank", "profile", "compile"),
    }
)


@contextmanager
def open_search(config: TrainConfig, world: World) -> Iterator[Path]:
    """The folder that `--evolve` writes to; every rank calls this.

    It is a new one, removed again where the search fails before anything is trained, unless `--resume` asks for that of
    a search, or the launcher has restarted the ranks of one.

    Raises:
        UserError: `--resume` means no search, or one with trainings of another kind; the folder exists and is not
            empty, with `--exist-ok`; it cannot be made.
    """
    earlier = world.recall("search")
    check_batch_size(config.batch_size, world.size)  # a resumed training may bring another, a search does not
    with ExitStack() as stack:
        if earlier:
            folder = Path(earlier)
        elif config.resume:
            folder = world.from_main(lambda: _continued(config))
            log.info(f"Continuing the search in {folder}")
        else:
            folder = stack.enter_context(_new_search(config, world))
        world.remember("search", str(folder))
        yield folder


@contextmanager
def _new_search(config: TrainConfig, world: World) -> Iterator[Path]:
    with new_run(dataclasses.replace(config, project=_project(config)), world) as folder:
        if world.from_main(lambda: any(folder.iterdir())):
            raise UserError(
                f"--exist-ok: {folder} is not empty, and a search writes to a folder of its own. Continue a search "
                f"with --resume {folder}, or leave --exist-ok out."
            )
        try:
            yield folder
        except Exception:  # not where it was stopped: it can be continued
            begun = [folder / TABLE, folder / FLAGS]
            if world.is_main and all(path in begun or path.is_dir() for path in folder.rglob("*")):
                for path in begun:
                    path.unlink(missing_ok=True)
            raise


def _project(config: TrainConfig) -> str:
    return config.project if config.project != TrainConfig.project else "runs/evolve"


def _continued(config: TrainConfig) -> Path:
    project = Path(_project(config)).expanduser().absolute()
    if config.resume == "newest":
        tables = sorted(project.glob(f"*/{TABLE}"), key=lambda path: path.stat().st_mtime_ns)
        if not tables:
            raise UserError(
                f"--evolve with --resume: found no search, looked for {project}/*/{TABLE}. Name its folder, --resume "
                "path/to/folder, or leave --resume out to begin one."
            )
        folder = tables[-1].parent
    else:
        given = Path(config.resume).expanduser().absolute()
        folder = given.parent if given.name == TABLE else given
        if not (folder / TABLE).is_file():
            raise UserError(
                f"--resume {shown(given)}: not the folder of a search, which has an {TABLE}. Name one that --evolve "
                "has written, or leave --resume out to begin a search."
            )
    _require_same_training(config, folder)
    return folder


def _require_same_training(config: TrainConfig, folder: Path) -> None:
    """Refuse flags with which a training would not compare with those of the table.

    Raises:
        UserError: names the first that differs.
    """
    path = folder / FLAGS
    if not path.is_file():  # of an earlier version
        return
    before: dict[str, Any] = read_yaml(path, "the flags of a search").values
    for key, now in config.as_dict().items():
        if key not in _FREE and before.get(key, now) != now:
            raise UserError(
                f"--resume {folder}: its trainings had --{key.replace('_', '-')} {shown(before[key])}, now it is "
                f"{shown(now)}: they could not be compared. Give the same flags, or leave --resume out to begin a "
                "search."
            )
