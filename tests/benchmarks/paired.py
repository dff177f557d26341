"""What runs of several arms say: mean and spread of each, and differences paired by seed."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MEASURES = ("map", "map50")
_HEAD = f"{'':<14}runs   mAP50-95           mAP50             seconds  in epochs  images/s  updates  parameters  GFLOPs"


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        arm, set, seed: which it is.
        flags: of train.py, but for those that name the seed, the data and the folder.
        map, map50: mAP50-95 and mAP50 of the best epoch.
        best_epoch: from 0.
        seconds: from the start of the process to its end.
        epochs_s: of these in epochs, their validations included.
        images_per_s: median of the epochs, validations excluded.
        timed: whether the seconds may be compared: the run had the machine for itself.
        updates: of the optimizer; skipped ones do not count.
        parameters, gflops: of the model, for an image of the run's size.
        commit: of the program, as the checkpoint says.
    """

    arm: str
    set: str
    seed: int
    flags: str
    map: float
    map50: float
    best_epoch: int
    seconds: float
    epochs_s: float
    images_per_s: float
    timed: bool
    updates: int
    parameters: int
    gflops: float
    commit: str | None

    @property
    def key(self) -> tuple[str, str, int]:
        """Arm, set and seed; a file has one run of each."""
        return self.arm, self.set, self.seed


def read_runs(path: Path) -> list[Run]:
    """The runs in a file of JSON lines; none where there is no file.

    Raises:
        ValueError: a line is no run, or repeats another.
    """
    runs: dict[tuple[str, str, int], Run] = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), start=1):
        try:
            run = Run(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number}: expected a run as a JSON object ({error}). Remove the line.") from error
        if runs.setdefault(run.key, run) is not run:
            raise ValueError(f"{path}:{number}: another run of {run.arm} on {run.set}, seed {run.seed}. Remove one.")
    return list(runs.values())


def append_run(path: Path, run: Run) -> None:
    """Add a run as the file's last line."""
    with path.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(run)) + "\n")


class Difference(NamedTuple):
    """A mean of paired differences.

    Attributes:
        mean: what the arm has more than the other.
        error: standard error of the mean; NaN for a single pair.
        pairs: how many there are.
    """

    mean: float
    error: float
    pairs: int

    @property
    def verdict(self) -> str:
        """Whether the mean is beyond twice its standard error, in a word."""
        if math.isnan(self.error):
            return "unknown: one seed"
        if abs(self.mean) <= 2 * self.error:
            return "equal: within 2 SE"
        return "better" if self.mean > 0 else "worse"


def difference(ours: Iterable[Run], theirs: Iterable[Run], measure: str) -> Difference | None:
    """Difference of two arms on a set: the mean over the seeds that both have; None where they share none.

    The standard error is that of the differences, not of the two means: what a seed does to both arms alike is no
    noise.
    """
    by_seed = {run.seed: getattr(run, measure) for run in theirs}
    found = [getattr(run, measure) - by_seed[run.seed] for run in ours if run.seed in by_seed]
    if not found:
        return None
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return Difference(statistics.fmean(found), error, len(found))


def table(runs: Sequence[Run], against: str | None = None) -> list[str]:
    """Lines: for each set a table of its arms, then each arm's differences from `against` (the first where None)."""
    arms, sets = list(dict.fromkeys(run.arm for run in runs)), list(dict.fromkeys(run.set for run in runs))
    base, lines = against or next(iter(arms), ""), []
    for name in sets:
        of_arm = {arm: [run for run in runs if (run.arm, run.set) == (arm, name)] for arm in arms}
        lines += [name, _HEAD, *(_row(arm, found) for arm, found in of_arm.items() if found)]
        for arm, found in of_arm.items():
            for measure in MEASURES if arm != base else ():
                paired = difference(found, of_arm.get(base, ()), measure)
                if paired is not None:
                    error = "" if math.isnan(paired.error) else f" ± {paired.error:.4f}"
                    what = f"{paired.mean:+.4f}{error} ({paired.pairs} paired)"
                    lines.append(f"  {arm} − {base}, {measure:<6}{what:<30}{paired.verdict}")
        lines.append("")
    return [*lines, *_remarks(runs)]


def _row(arm: str, runs: Sequence[Run]) -> str:
    """An arm on a set; its seconds are those of its timed runs, where it has any."""
    accuracy = "".join(f"{_spread([getattr(run, measure) for run in runs]):<18}" for measure in MEASURES)
    timed = [run for run in runs if run.timed]
    mark = " " if timed else "*"
    seconds, epochs_s, images_per_s = (
        statistics.fmean(getattr(run, name) for run in timed or runs)
        for name in ("seconds", "epochs_s", "images_per_s")
    )
    updates, parameters, gflops = (
        statistics.fmean(getattr(run, name) for run in runs) for name in ("updates", "parameters", "gflops")
    )
    return (
        f"  {arm:<12}{len(runs):>4}   {accuracy}{seconds:>7.0f}{mark}{epochs_s:>10.0f}{mark}{images_per_s:>9.1f}{mark}"
        f"{updates:>8.0f}{parameters:>12,.0f}{gflops:>8.2f}"
    )


def _spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation; of one value the mean alone."""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def _remarks(runs: Sequence[Run]) -> list[str]:
    """What a reader must know of the runs before comparing them."""
    found = [] if all(run.timed for run in runs) else ["* no run of the arm had the machine for itself: not comparable"]
    for arm in dict.fromkeys(run.arm for run in runs):
        commits = dict.fromkeys((run.commit or "unknown")[:10] for run in runs if run.arm == arm)
        if len(commits) > 1:
            found.append(f"{arm}: runs of several commits: {', '.join(commits)}")
    return found
