"""Layers of the code: packages from the bottom up, their imports, and the diagram of them in docs/architecture.md.

uv run python -m tests.layers      # draw the diagram again
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
# From the bottom up: a file imports from its own package and from those before it; data and models never import each
# other.
LAYERS = (
    "tessera.utils",
    "tessera.utils.machine",
    "tessera.utils.ranks",
    "tessera.models.layers",
    "tessera.models.heads",
    "tessera.models",
    "tessera.utils.engine",
    "tessera.data.source.annotations",
    "tessera.data.source",
    "tessera.data.augment",
    "tessera.data.feed",
    "tessera.utils.checkpoints",
    "tessera.deploy.runtime",
    "tessera.utils.evaluation",
    "tessera.utils.report",
    "tessera.utils.training",
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
COMMANDS = sorted(ROOT.glob("[a-z]*.py"))
PACKAGES = ("data", "models", "utils", "analysis", "deploy")
FILES = [*COMMANDS, *sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))]


def module_of(path: Path) -> str:
    """Dotted name of a first-party file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    above = () if parts[0] == "tessera" else ("tessera",) if parts[0] in PACKAGES else ("tessera", "commands")
    return ".".join((*above, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def layer_of(module: str) -> str:
    """The innermost package that a first-party module lies in."""
    return max((package for package in LAYERS if module == package or module.startswith(f"{package}.")), key=len)


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
def layers_below(package: str) -> frozenset[str]:
    """The other packages that the files of a package import from."""
    files = [path for path in FILES if layer_of(module_of(path)) == package]
    modules = [module for path in files for module, _ in imports(parsed(path))]
    return frozenset({layer_of(module) for module in modules if module.startswith("tessera.")} - {package})


@cache
def reached(package: str) -> frozenset[str]:
    """The packages that a package imports from, and those that these import from."""
    return layers_below(package).union(*map(reached, layers_below(package)))


def picture() -> str:
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
    return before + picture() + rest.partition("\n```")[2]


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
