"""Folders of runs: a new one for each run, the newest checkpoint among them, the YAML files inside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from tessera.utils.checkpoints.provenance import written_by
from tessera.utils.config import TrainConfig
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.files import atomic_write, remove_leftovers
from tessera.utils.flags.detect import DetectConfig
from tessera.utils.flags.val import MeasuringConfig
from tessera.utils.ranks.run_lock import RunLock, hold_run
from tessera.utils.ranks.world import World
from tessera.utils.text import shown


@contextmanager
def new_run(
    flags: TrainConfig | MeasuringConfig | DetectConfig,
    world: World,
    files: Iterable[str | Path] = (),
    *,
    waits: bool = True,
) -> Iterator[Path]:
    """Make the folder of a run, `project/name`, or the first free one of `name2`, `name3`, …; every rank enters this.

    Only rank 0 touches the disk; all ranks learn the absolute path, which need not be there on another node. What
    killed runs of this host were writing into folders of this project is removed. The lock is held to the end; a new
    folder that is still empty then is removed again.

    Args:
        flags: that name it, and say whether `project/name` is taken though it exists.
        world: the ranks.
        files: that the run reads; ConfigError where --exist-ok names a folder in which one of them lies.
        waits: for another process that writes there, as of `hold_run`, whose errors it raises.
    """
    first = first_run(flags)
    with ExitStack() as stack:
        if flags.exist_ok:
            world.from_main(lambda: require_apart(first, files))
            run = stack.enter_context(hold_run(first, world, waits=waits))
        else:
            run = world.from_main(lambda: stack.enter_context(_make_new(first)).run)
        world.from_main(lambda: _remove_leftovers(first.parent))
        yield run


def first_run(flags: TrainConfig | MeasuringConfig | DetectConfig) -> Path:
    """The folder of the first run of a name, which --exist-ok writes into; it may not be there yet."""
    return Path(flags.project).expanduser().absolute() / flags.name


def require_apart(run: Path, files: Iterable[str | Path]) -> None:
    """Raise ConfigError where a file that is read lies in or below a folder of results, which could replace it."""
    lies_there = lying_in(run)
    for file in files:
        if lies_there(file):
            raise ConfigError(
                f"{shown(Path(file))}: it lies in the folder of results {shown(run)}, which could replace it. "
                "Leave --exist-ok out, or give another --project or --name."
            )


# Paths are strings here: as Path objects, a hundred thousand of them cost seconds.
def lying_in(folder: Path) -> Callable[[str | Path], bool]:
    """Whether a file lies in a folder, or below it, under whatever path; each folder is resolved once."""
    try:
        wanted = folder.stat()
    except OSError:  # not there yet
        return lambda file: False

    @cache
    def is_below(real: str) -> bool:
        above = os.path.dirname(real)  # noqa: PTH120
        with suppress(OSError):
            if os.path.samestat(os.stat(real), wanted):  # noqa: PTH116
                return True
        return above != real and is_below(above)

    @cache
    def leads_there(given: str) -> bool:
        return is_below(os.path.realpath(given))

    def lies_there(file: str | Path) -> bool:
        path = os.path.realpath(file) if os.path.islink(file) else os.fspath(file)  # noqa: PTH114
        return leads_there(os.path.dirname(path))  # noqa: PTH120

    return lies_there


def _remove_leftovers(project: Path) -> None:
    for folder in (*project.glob("*/"), *project.glob("*/weights/")):
        remove_leftovers(folder)


def _make_new(first: Path) -> RunLock:
    """The lock on a folder that was not there before."""
    number, lock = 1, RunLock(first)
    while lock.take(new=True) is not None:
        number += 1
        lock = RunLock(first.with_name(f"{first.name}{number}"))
    return lock


def newest_last_checkpoint(project: str | Path) -> Path:
    """Return the `weights/last.pt` under `project` that was written last: what a bare `--resume` means."""
    folder = Path(project).expanduser().absolute()
    found = [(path.stat().st_mtime_ns, path) for path in folder.glob("**/weights/last.pt")]
    if not found:
        runs = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else None
        seen = "no such folder" if runs is None else f"runs there: {', '.join(runs[:10]) or 'none'}"
        raise UserError(
            f"--resume: found no checkpoint, looked for {folder}/**/weights/last.pt ({seen}). "
            "Name the file, --resume path/to/last.pt, or the folder of runs with --project."
        )
    return max(found)[1]


def write_flags(path: Path, config: TrainConfig) -> None:
    """Write the flags of a run as YAML, below a comment that says which program it was."""
    said = {**written_by(), "torch": torch.__version__}
    write_yaml(path, config.as_dict(), ", ".join(f"{name} {value}" for name, value in said.items() if value))


def write_yaml(path: Path, values: Mapping[str, Any], comment: str = "") -> None:
    """Write `values` as YAML, keys in their order, the file whole or not at all.

    Paths become strings, tuples and arrays lists, NumPy numbers plain ones. `comment` is one line above them.
    """
    text = yaml.safe_dump(_plain(values), sort_keys=False, allow_unicode=True)
    text = f"# {comment}\n{text}" if comment else text
    with atomic_write(path) as file:
        file.write(text.encode())


def _plain(value: Any) -> Any:
    """The same value in YAML's own types."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
