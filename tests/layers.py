"""Layers of the code: packages from the bottom up, their imports, the diagram of them in docs/architecture.md, sizes.

uv run --group dev python -m tests.layers      # draw the diagram again, and print the sizes
"""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
# From the bottom up: a file imports from its own package and from those before it; data and models never import each
# other.
LAYERS = (
    "tessera.utils.base",  # the modules of BASE
    "tessera.models.layers",
    "tessera.models.heads",
    "tessera.models",
    "tessera.utils",
    "tessera.utils.machine",
    "tessera.utils.ranks",
    "tessera.utils.engine",
    "tessera.data.labels",
    "tessera.data.source",
    "tessera.data.augment",
    "tessera.data.feed",
    "tessera.utils.checkpoints",
    "tessera.deploy.foreign",
    "tessera.utils.evaluation",
    "tessera.utils.report",
    "tessera.utils.training",
    "tessera.deploy.runtime",
    "tessera.deploy.exporting",
    "tessera.deploy.inference.sources",
    "tessera.deploy.inference",
    "tessera.deploy",
    "tessera.analysis",
    "tessera.analysis.checks",
    "tessera.analysis.report",
    "tessera.analysis.comparison",
    "tessera.commands",
    "tessera",
)
# Modules of utils that models may import, and what these import.
BASE = frozenset(
    f"tessera.utils.{name}"
    for name in ("bit_depth", "boxes", "errors", "files", "image_size", "seeding", "text", "types", "yaml_file")
)
COMMANDS = sorted(ROOT.glob("[a-z]*.py"))
PACKAGES = ("data", "models", "utils", "analysis", "deploy")
# Without the launcher that is started by itself on a cluster and needs ray.
FILES = [
    *COMMANDS,
    *sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py") if p.name != "ray_train.py"),
]


def module_of(path: Path) -> str:
    """Dotted name of a first-party file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    above = () if parts[0] == "tessera" else ("tessera",) if parts[0] in PACKAGES else ("tessera", "commands")
    return ".".join((*above, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def layer_of(module: str) -> str:
    """The innermost package that a first-party module lies in; for a module of BASE that layer."""
    if module in BASE:
        return LAYERS[0]
    return max((package for package in LAYERS if module == package or module.startswith(f"{package}.")), key=len)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """Absolute module names with the line of their import, also inside functions; not those of TYPE_CHECKING."""
    found: list[tuple[str, int]] = []
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found.append((node.module or "", node.lineno))
    return found


@cache
def layers_below(package: str) -> frozenset[str]:
    """The other packages that the files of a package import from."""
    files = [path for path in FILES if layer_of(module_of(path)) == package]
    modules = [module for path in files for module, _ in imports(parsed(path))]
    return frozenset({layer_of(module) for module in modules if module.startswith("tessera.")} - {package})


@cache
def reached(package: str) -> frozenset[str]:
    """The packages that a package imports from, and those that these import from."""
    return layers_below(package).union(*map(reached, layers_below(package)))


def diagram() -> str:
    """A Mermaid chart: an arrow from a package to each package below it, but for those that another arrow leads to."""
    lines = ["```mermaid", "flowchart TD"]
    for package in reversed(LAYERS):
        if package == "tessera":  # which imports on demand
            continue
        name = package.removeprefix("tessera.").replace(".", "/")
        node = f'{package.replace(".", "_")}["{name}"]'
        below = layers_below(package)
        direct = [other for other in LAYERS if other in below and not any(other in reached(b) for b in below)]
        ends = " & ".join(other.replace(".", "_") for other in reversed(direct))
        lines.append(f"  {node} --> {ends}" if direct else f"  {node}")
    return "\n".join([*lines, "```"])


def drawn(page: str) -> str:
    before, _, rest = page.partition("```mermaid")
    return before + diagram() + rest.partition("\n```")[2]


MODULES = {module_of(path): path for path in FILES}
CORE = ("tessera.commands.train", "tessera.commands.val", "tessera.data", "tessera.models", "tessera.utils")


class Size(NamedTuple):
    """Number of modules and of lines."""

    modules: int
    lines: int


def size(modules: Iterable[str]) -> Size:
    lines = [len(MODULES[module].read_text().splitlines()) for module in modules]
    return Size(len(lines), sum(lines))


def inside(*packages: str) -> set[str]:
    """The modules of packages."""
    return {module for module in MODULES if f"{module}.".startswith(tuple(f"{package}." for package in packages))}


@cache
def imported_by(module: str) -> frozenset[str]:
    """The modules of this program that a module imports."""
    return frozenset(name for name, _ in imports(parsed(MODULES[module])) if name in MODULES)


def closure(module: str) -> set[str]:
    """The modules that a module imports, and that these import."""
    found: set[str] = set()
    left = [module]
    while left:
        new = imported_by(left.pop()) - found
        found |= new
        left += new
    return found


def with_one_importer() -> set[str]:
    """The modules that exactly one other imports."""
    importers = Counter(name for module in MODULES for name in imported_by(module) - {module})
    return {module for module, count in importers.items() if count == 1}


def lines_of_python() -> tuple[int, int]:
    """Lines of Python outside and inside tests/, of the files of the repository."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.pyi"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [path for path in map(ROOT.joinpath, listed.stdout.splitlines()) if not path.is_symlink()]
    lines = {path: len(path.read_text().splitlines()) for path in files if path.is_file()}
    tests = sum(count for path, count in lines.items() if path.is_relative_to(ROOT / "tests"))
    return sum(lines.values()) - tests, tests


def sizes() -> str:
    """The table of sizes."""
    train, detector = closure("tessera.commands.train"), closure("tessera.models.detector")
    core, utils = size(inside(*CORE)), size(inside("tessera.utils"))
    rows = [
        ("imported by train.py", "{} modules, {:,} lines".format(*size(train))),
        ("of these outside the core", f"{len(train - inside(*CORE))} modules"),
        ("the core", "{} modules, {:,} lines".format(*core)),
        ("utils/", "{} modules, {:,} lines".format(*utils)),
        ("imported by models/detector.py", "{} modules, {:,} lines".format(*size(detector))),
        ("modules with one importer", "{} modules, {:,} lines".format(*size(with_one_importer()))),
        ("Python outside tests, in tests", "{:,}, {:,} lines".format(*lines_of_python())),
    ]
    return "\n".join(f"{name:32}{value}" for name, value in rows)


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
    print(sizes())
