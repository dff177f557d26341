"""Run directories: creation, numbering, newest checkpoint, YAML files; refusal of inputs that lie inside one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from tessera.utils.config import TrainConfig
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.files import absolute_path, atomic_write, remove_leftovers
from tessera.utils.flags.program import program_version
from tessera.utils.ranks.run_lock import RunLock, lock_run
from tessera.utils.ranks.world import World
from tessera.utils.text import shown
from tessera.utils.yaml_file import dump_yaml

log = logging.getLogger(__name__)


class RunFlags(Protocol):
    """Flags of a command that writes into a run directory."""

    @property
    def project(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def exist_ok(self) -> bool: ...


@contextmanager
def new_run(flags: RunFlags, world: World, files: Iterable[str | Path] = (), *, waits: bool = True) -> Iterator[Path]:
    """Create the run directory `project/name`, or the first free one of `name2`, `name3`, …; every rank enters this.

    Rank 0 alone touches the disk; all ranks get the absolute path, which may not exist on other hosts. Leftover
    temporary files of killed runs of this host are removed. The lock is held to the end; a directory that is still
    empty then is removed.

    Args:
        flags: `project`, `name` and `exist_ok`.
        files: inputs of the run; ConfigError if --exist-ok names a directory that contains one.
        waits: for another process that writes there, as of `lock_run`, whose errors it raises.
    """
    first = run_path(flags)
    with ExitStack() as stack:
        if flags.exist_ok:
            world.run_on_main(lambda: require_outside(first, files))
            run = stack.enter_context(lock_run(first, world, waits=waits))
        else:
            run = world.run_on_main(lambda: stack.enter_context(_make_new(first)).run)
        folders = (*first.parent.glob("*/"), *first.parent.glob("*/weights/"), *run.glob("**/"))
        world.run_on_main(lambda: [*map(remove_leftovers, folders)])
        yield run


def run_path(flags: RunFlags) -> Path:
    """Return the directory `project/name`, which may not exist yet."""
    return absolute_path(Path(flags.project).expanduser()) / flags.name


def require_outside(run: Path, files: Iterable[str | Path]) -> None:
    """Raise ConfigError if an input lies in or below an output directory, which could overwrite it."""
    lies_there = inside_test(run)
    for file in files:
        if lies_there(file):
            raise ConfigError(
                f"{shown(Path(file))}: an input in the output directory {shown(run)}, which could overwrite it. Omit "
                "--exist-ok, or give another --project or --name."
            )


# Paths are strings here: 100,000 Path objects take seconds.
def inside_test(folder: Path) -> Callable[[str | Path], bool]:
    """Return a test whether a file lies in a directory or below it, also through links."""
    wanted = os.path.realpath(folder)

    @cache
    def is_below(directory: str) -> bool:
        return f"{os.path.realpath(directory)}/".startswith(f"{wanted}/")

    def lies_there(file: str | Path) -> bool:
        path = os.path.realpath(file) if os.path.islink(file) else os.fspath(file)  # noqa: PTH114
        return is_below(os.path.dirname(path))  # noqa: PTH120

    return lies_there


def _make_new(first: Path) -> RunLock:
    number, lock = 1, RunLock(first)
    while lock.take(new=True) is not None:
        number += 1
        lock = RunLock(first.with_name(f"{first.name}{number}"))
    return lock


def newest_last_checkpoint(project: str | Path) -> Path:
    """Return the latest `weights/last.pt` under `project`, for a bare `--resume`."""
    return _newest(
        project, "--resume", "Give the file, --resume path/to/last.pt, or the directory of runs with --project."
    )


def newest_best_checkpoint() -> str:
    """Return and log the `best.pt` of the newest run in runs/train, for commands without `--weights`.

    Raises:
        UserError: no run, or one without the file.
    """
    zoo = "a published file, such as --weights yolox_s.pth (Apache-2.0, downloaded)"
    last = _newest(TrainConfig.project, "--weights: not given", f"Train first, or give a checkpoint, or {zoo}.")
    best = last.with_name("best.pt")
    if not best.is_file():
        raise UserError(f"--weights: not given, and the newest run has no {best} yet. Give --weights {last}, or {zoo}.")
    log.info(f"--weights {best}: the newest run's.")
    return str(best)


def _newest(project: str | Path, flag: str, remedy: str) -> Path:
    folder = absolute_path(Path(project).expanduser())
    found = [(path.stat().st_mtime_ns, path) for path in folder.glob("**/weights/last.pt")]
    if not found:
        runs = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else None
        seen = "no such directory" if runs is None else f"runs there: {', '.join(runs[:10]) or 'none'}"
        raise UserError(f"{flag}: found no checkpoint {folder}/**/weights/last.pt ({seen}). {remedy}")
    return max(found)[1]


def write_flags(path: Path, config: TrainConfig) -> None:
    """Write a run's flags as YAML, below a comment with the program's version."""
    program = {**program_version(), "torch": torch.__version__}
    write_yaml(path, config.as_dict(), ", ".join(f"{name} {value}" for name, value in program.items() if value))


def write_yaml(path: Path, values: Mapping[str, Any], comment: str = "") -> None:
    """Write `values` as of `dump_yaml` atomically, below a comment of one line."""
    text = dump_yaml(values)
    text = f"# {comment}\n{text}" if comment else text
    with atomic_write(path) as file:
        file.write(text.encode())
