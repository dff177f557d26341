"""The plan of the house: its rooms, their imports, and the picture of them in docs/architecture.md.

uv run python -m tests.house      # draw the picture again
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
# Every room, from the ground up: a file imports from its own room and from those before it. data and models meet in
# the rooms after them, and never import each other.
ROOMS = (
    "tessera.utils",
    "tessera.utils.machine",
    "tessera.utils.ranks",
    "tessera.models.layers",
    "tessera.models.heads",
    "tessera.models",
    "tessera.utils.engine",
    "tessera.data.source.annotations",
    "tessera.data.source",
    "tessera.data.source.checks",
    "tessera.data.augment",
    "tessera.data.feed",
    "tessera.utils.checkpoints",
    "tessera.utils.runtime",
    "tessera.utils.evaluation",
    "tessera.utils.diagnosis",
    "tessera.utils.suspects",
    "tessera.utils.inference.sources",
    "tessera.utils.report.page",
    "tessera.utils.report.albums",
    "tessera.utils.report",
    "tessera.utils.search",
    "tessera.utils.training",
    "tessera.utils.exporting",
    "tessera.utils.inference",
    "tessera.commands",
    "tessera",
)
COMMANDS = sorted(ROOT.glob("*.py"))
PACKAGES = ("data", "models", "utils")
FILES = [*COMMANDS, *sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))]


def module_of(path: Path) -> str:
    """Dotted name of a first-party file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    above = () if parts[0] == "tessera" else ("tessera",) if parts[0] in PACKAGES else ("tessera", "commands")
    return ".".join((*above, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def room_of(module: str) -> str:
    """The innermost room that a first-party module lies in."""
    return max((room for room in ROOMS if module == room or module.startswith(f"{room}.")), key=len)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """Absolute module names with the line of their import."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found.append((node.module or "", node.lineno))
    return found


@cache
def rooms_below(room: str) -> frozenset[str]:
    """The other rooms that the files of a room import from."""
    files = [path for path in FILES if room_of(module_of(path)) == room]
    modules = [module for path in files for module, _ in imports(parsed(path))]
    return frozenset({room_of(module) for module in modules if module.startswith("tessera.")} - {room})


@cache
def reached(room: str) -> frozenset[str]:
    """The rooms that a room imports from, and those that these import from."""
    return rooms_below(room).union(*map(reached, rooms_below(room)))


def picture() -> str:
    """A Mermaid chart: an arrow from a room to each room below it, but for those that another arrow leads to."""
    lines = ["```mermaid", "flowchart TD"]
    for room in reversed(ROOMS):
        if room == "tessera":  # the door, which imports on demand
            continue
        name = room.removeprefix("tessera.").replace(".", "/")
        lines.append(f'  {room.replace(".", "_")}["{name}"]')
        below = rooms_below(room)
        direct = [other for other in ROOMS if other in below and not any(other in reached(b) for b in below)]
        lines += [f"  {room.replace('.', '_')} --> {other.replace('.', '_')}" for other in reversed(direct)]
    return "\n".join([*lines, "```"])


def drawn(page: str) -> str:
    before, _, rest = page.partition("```mermaid")
    return before + picture() + rest.partition("\n```")[2]


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
