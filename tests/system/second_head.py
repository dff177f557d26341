"""The commands with one more head, from a folder of the tests: `second_head.py train|val|parity FLAGS`.

The first lines are all that a head in another folder takes; one in models/heads takes none.
"""

from __future__ import annotations

import sys
from pathlib import Path

import models.heads

EXTRA = Path(__file__).resolve().parents[1] / "models" / "heads" / "extra"
models.heads.__path__.append(str(EXTRA))

import train  # noqa: E402
import val  # noqa: E402
from tests.system import parity_program  # noqa: E402
from utils.ranks.failures import run_rank  # noqa: E402

MODEL = EXTRA / "tiny" / "tiny.yaml"


def main() -> int:
    command, *flags = sys.argv[1:]
    if command == "parity":
        sys.argv[1:] = flags
        return run_rank(parity_program.main)[0]
    return {"train": train, "val": val}[command].main(flags)


if __name__ == "__main__":
    sys.exit(main())
