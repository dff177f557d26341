"""`tessera train --data shapes.yaml`, or `python -m tessera train …`: a command by its name."""

from __future__ import annotations

import runpy
import sys

from tessera.utils.errors import did_you_mean
from tessera.utils.flags.options import version_line
from tessera.utils.flags.program import IS_CLONE
from tessera.utils.startup import protect_streams
from tessera.utils.text import shown

COMMANDS = ("train", "val", "detect", "export", "compare")
USAGE = (
    f"usage: {'python -m ' if IS_CLONE else ''}tessera {{{','.join(COMMANDS)}}} [flags]\n"
    "--help after a command lists its flags; --version prints the version."
)


def main() -> int:
    """Run the command that the first argument names, as if its file had been started; returns the exit code."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in COMMANDS:
        del sys.argv[1]
        runpy.run_module(f"tessera.commands.{command}", run_name="__main__", alter_sys=True)
        return 0
    protect_streams()
    if command in ("-h", "--help"):
        print(USAGE)
    elif command == "--version":
        print(version_line())
    else:
        hint = did_you_mean(command, (*COMMANDS, "--help", "--version"))
        problem = f"no command is called {shown(command)}.{hint}" if command else "no command is given."
        print(f"error: {problem}\n{USAGE}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
