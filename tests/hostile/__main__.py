"""Hostile inputs for every part of the product; a failure is anything but a result or one clean message.

python -m tests.hostile                                    # make hostile
python -m tests.hostile --only checkpoints --cases 5000 --seed 1
python -m tests.hostile --only checkpoints --case 17        # one of them again
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tessera.utils.environment import configure_libraries
from tests.hostile.campaign import Subject, run_cases, subject_names


def main() -> int:
    """Run what is asked for and print the table; returns 1 where a case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="of each subject; default: what the subject says")
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--only", nargs="+", choices=subject_names(), default=subject_names())
    parser.add_argument("--fast", action="store_true", help="the few cases of the default suite")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    asked = parser.parse_args()
    configure_libraries()  # as the commands do, before a subject imports it from elsewhere
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a case is forked, and threads are not

    rows: list[tuple[str, str, str, str]] = []
    for name in asked.only:
        subject = Subject.load(name)
        usual = subject.fast_cases if asked.fast else subject.cases
        cases = range(usual if asked.cases is None else asked.cases) if asked.case is None else [asked.case]
        kinds, failures = Counter[str](), 0
        with tempfile.TemporaryDirectory(prefix="hostile") as home:
            for outcome in run_cases(subject, asked.seed, cases, Path(home), asked.jobs):
                if not outcome.failure:
                    kinds[outcome.kind] += 1
                else:
                    failures += 1
                    again = f"python -m tests.hostile --only {name} --seed {asked.seed} --case {outcome.number}"
                    print(f"FAILED: {again}\n{outcome.failure}", flush=True)
        print(f"{name}: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())), flush=True)
        rows.append((name, f"{len(cases):,}", str(len(kinds)), str(failures)))

    for row in [("subject", "cases", "kinds", "failures"), *rows]:
        print("{:16} {:>8} {:>6} {:>9}".format(*row))
    return int(any(row[-1] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
