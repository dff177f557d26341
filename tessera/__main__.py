"""`python -m tessera train --data shapes.yaml`: a command by its name, with the flags of `python train.py`."""

from __future__ import annotations

import runpy
import sys

COMMANDS = ("train", "val", "detect", "export")


def main() -> None:
    """Run the command that the first argument names, as if its file had been started."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        asked = sys.argv[1] if len(sys.argv) > 1 else None
        wanted = f"usage: python -m tessera {{{','.join(COMMANDS)}}} [flags]; --help after a command lists its flags"
        if asked in ("-h", "--help"):
            print(wanted)
            return
        sys.exit(f"error: {'no command is given' if asked is None else f'no command is called {asked!r}'}\n{wanted}")
    command = sys.argv.pop(1)
    runpy.run_module(f"tessera.commands.{command}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
