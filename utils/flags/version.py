"""What `--version` prints."""

from __future__ import annotations

import platform
from importlib import import_module

from tessera.utils.environment import quieten_torch
from tessera.utils.flags.program import git_revision
from tessera.utils.version import __version__


def version_line() -> str:
    """The version, its git revision where there is one, Python, torch, and the device that a run takes by itself.

    Torch is imported for this alone: every other answer to a command line does without.
    """
    quieten_torch()
    choose = import_module("tessera.utils.machine.choose")
    revision = git_revision()
    program = f"tessera {__version__}" + (f" (git {revision})" if revision else "")
    torch = import_module("torch").__version__
    return f"{program}, Python {platform.python_version()}, torch {torch}, device {choose.device_by_itself()}"
