"""A release: whether its tag, version and changelog agree, and the tree has no changes.

uv run python -m tests.release
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.layers import ROOT


def version_of(root: Path) -> str:
    text = (root / "utils" / "flags" / "version.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, flags=re.MULTILINE)
    return str(version)


def source_problems(root: Path) -> list[str]:
    """Why the commit of a clone is not to be released; a line each."""
    version, found = version_of(root), []
    tags = _git(root, "tag", "--points-at", "HEAD")
    if f"v{version}" not in tags:
        found.append(
            f"the commit has {', '.join(map('the tag {}'.format, tags)) or 'no tag'}, but utils/flags/version.py says "
            f"{version}. Tag it v{version}, or change the version."
        )
    unreleased, newest = _changelog(root)
    if newest != version:
        found.append(
            f"CHANGELOG.md: its newest section is {newest}, but utils/flags/version.py says {version}. Give it "
            f"the heading `## [{version}] - ` with a date."
        )
    if unreleased:
        found.append(f"CHANGELOG.md: Unreleased has entries, which belong to {version}. Move them to its section.")
    if changed := _git(root, "status", "--porcelain"):
        found.append(f"the tree has changes: {', '.join(changed[:5])}. Commit or remove them.")
    return found


def _changelog(root: Path) -> tuple[str, str]:
    """What is unreleased, and the version of the newest section; "" where there is none."""
    text = (root / "CHANGELOG.md").read_text()
    unreleased, version = "", ""
    for name, dated, body in re.findall(r"^## \[([^\]]+)\](.*)\n((?:(?!## ).*\n)*)", text, flags=re.MULTILINE):
        if name == "Unreleased":
            unreleased = body.strip()
        elif not version:
            version = name if re.fullmatch(r" - \d{4}-\d{2}-\d{2}", dated) else f"{name} without a date"
    return unreleased, version


def _git(root: Path, *words: str) -> list[str]:
    said = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout
    return said.splitlines()


def main() -> int:
    """Print what is wrong; returns 1 where something is."""
    found = source_problems(ROOT)
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
