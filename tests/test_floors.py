"""The house keeps its floors: imports go down only, and a few libraries have one room each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASEMENT = {
    "archives",
    "batchnorm",
    "boxes",
    "device",
    "distributed",
    "download",
    "environment",
    "errors",
    "files",
    "heap",
    "meet",
    "seeding",
    "pulse",
    "stacks",
}
OPTIONAL = {
    "albumentations",
    "wandb",
    "mlflow",
    "clearml",
    "comet_ml",
    "tensorboard",
    "torch.utils.tensorboard",
    "onnx",
}
FILES = [
    ROOT / "train.py",
    ROOT / "val.py",
    *sorted(p for d in ("data", "models", "utils") for p in (ROOT / d).glob("*.py")),
]
MAX_FORKS_IN_TRAIN = 12


def floor(module: str) -> int:
    """Height of a first-party module: 0 is the lowest floor."""
    head, _, rest = module.partition(".")
    if head in ("train", "val"):
        return {"train": 6, "val": 5}[head]
    if head in ("data", "models"):
        return 4
    name = rest.split(".")[0]
    return {"config": 3, "structures": 2}.get(name, 1 if name in BASEMENT else 4)


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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    me = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    package = me.split(".")[0]
    for module, line in imports(ast.parse(path.read_text())):
        other = module.split(".")[0]
        if other not in ("train", "val", "data", "models", "utils"):
            continue
        assert floor(module) <= floor(me), f"{path}:{line}: {me} imports {module}, which lies above it"
        if floor(me) == floor(module) == 4:
            assert other == package, f"{path}:{line}: {me} and {module} are on one floor and never import each other"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_import_inside_a_function(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for module, line in imports(node):
                assert module in OPTIONAL or module.split(".")[0] in OPTIONAL, (
                    f"{path}:{line}: import inside a function"
                )


@pytest.mark.parametrize(
    ("library", "home"), [("torch.distributed", "utils/distributed.py"), ("argparse", "utils/config.py")]
)
def test_one_room_for(library: str, home: str) -> None:
    for path in FILES:
        if path != ROOT / home:
            names = [module for module, _ in imports(ast.parse(path.read_text()))]
            assert not any(n == library or n.startswith(library + ".") for n in names), f"{path} imports {library}"


def test_environment_is_read_in_one_place() -> None:
    for path in FILES:
        if path.name != "environment.py":
            text = path.read_text()
            assert "os.environ" not in text and "getenv" not in text, f"{path} reads the environment"


def test_train_has_few_forks() -> None:
    tree = ast.parse((ROOT / "train.py").read_text())
    train = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "train")
    forks = [n for n in ast.walk(train) if isinstance(n, (ast.If, ast.IfExp, ast.Match))]
    assert len(forks) <= MAX_FORKS_IN_TRAIN, f"train() has {len(forks)} forks, at most {MAX_FORKS_IN_TRAIN} are allowed"
