"""A release: whether its tag, version and changelog agree, and what the files hold that are built of it.

uv run python -m tests.release           # the commit
uv run python -m tests.release dist      # the wheel and the source archive in dist
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

from tests.house import ROOT

LICENCES = ("LICENSE", "NOTICE")


def version_of(root: Path) -> str:
    """The version that the source says."""
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


def built_problems(folder: Path, root: Path) -> list[str]:
    """Why the files built of a clone are not to be published; a line each."""
    wheels, archives = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(archives) != 1:
        names = [path.name for path in (*wheels, *archives)]
        return [f"{folder}: found {', '.join(names) or 'nothing'}, expected one wheel and one source archive."]
    found = []
    for path, files in ((wheels[0], _wheel(wheels[0])), (archives[0], _archive(archives[0]))):
        described = message_from_bytes(next(content for name, content in files.items() if name in _METADATA))
        if described["Version"] != version_of(root):
            found.append(f"{path.name}: it is version {described['Version']}, expected {version_of(root)}.")
        for name in LICENCES:
            if files.get(name) != (root / name).read_bytes():
                found.append(f"{path.name}: {name} of the clone is not in it.")
            if name not in described.get_all("License-File", []):
                found.append(f"{path.name}: its metadata does not name {name} as a License-File.")
    return found


_METADATA = ("METADATA", "PKG-INFO")


def _wheel(path: Path) -> dict[str, bytes]:
    """What a wheel says of itself: metadata and licences, by name."""
    with zipfile.ZipFile(path) as opened:
        parts = {name: re.sub(r"^[^/]+\.dist-info/(licenses/)?", "", name) for name in opened.namelist()}
        return {short: opened.read(name) for name, short in parts.items() if short in (*_METADATA, *LICENCES)}


def _archive(path: Path) -> dict[str, bytes]:
    """What a source archive says of itself: metadata and licences, by name."""
    with tarfile.open(path) as opened:
        parts = {member: member.name.partition("/")[2] for member in opened if member.isfile()}
        wanted = {member: short for member, short in parts.items() if short in (*_METADATA, *LICENCES)}
        return {short: file.read() for member, short in wanted.items() if (file := opened.extractfile(member))}


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
    found = built_problems(Path(sys.argv[1]), ROOT) if len(sys.argv) > 1 else source_problems(ROOT)
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
