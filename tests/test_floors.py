"""The plan of the house: imports go down only, rooms stay small, and a few libraries have one room each."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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
    "tessera.utils.inference.sources",
    "tessera.utils.report",
    "tessera.utils.search",
    "tessera.utils.inference",
    "tessera.utils.exporting",
    "tessera.commands",
    "tessera",
)
HOMES = {  # libraries that one place alone imports
    "torch.distributed": "tessera.utils.ranks",
    "argparse": "tessera.utils.flags.options",
    "cv2": "tessera.utils.machine.opencv",
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
    "onnxruntime",
    "openvino",
    "nncf",
    "onnx_ir",
}
COMMANDS = sorted(ROOT.glob("*.py"))
PACKAGES = ("data", "models", "utils")
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
FILES = [*COMMANDS, *sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))]
DEVICE_TYPE = re.compile(r"""device\.type|is_cuda|is_mps|torch\.cuda|\.mps|\.kind [=!]=|\(["'](cuda|mps)""")
MAX_FILES, MAX_LINES, MAX_LINES_OF_TRAIN, MAX_FORKS_IN_TRAIN = 13, 350, 400, 12


def module_of(path: Path) -> str:
    """Dotted name of a first-party file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    above = () if parts[0] == "tessera" else ("tessera",) if parts[0] in PACKAGES else ("tessera", "commands")
    return ".".join((*above, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def room_of(module: str) -> str:
    """The innermost room that a first-party module lies in."""
    return max((room for room in ROOMS if module == room or module.startswith(f"{room}.")), key=len)


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


def test_imports_go_down_only() -> None:
    for path in FILES:
        me = room_of(module_of(path))
        for module, line in imports(ast.parse(path.read_text())):
            if module.startswith("tessera."):
                other, place = room_of(module), f"{path}:{line}: {me} imports {module}"
                assert ROOMS.index(other) <= ROOMS.index(me), f"{place}, which lies above it"
                assert other != "tessera.commands", f"{place}, a command"
                assert {other.split(".")[1], me.split(".")[1]} != {"data", "models"}, place


def test_no_import_inside_a_function() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside = [(m, line) for m, line in imports(node) if not {m, m.partition(".")[0]} & OPTIONAL]
                assert not inside, f"{path}: imports inside a function: {inside}"


def test_some_libraries_have_one_home() -> None:
    for path in FILES:
        me = module_of(path)
        for module, line in imports(ast.parse(path.read_text())):
            for library, home in HOMES.items():
                if module == library or module.startswith(f"{library}."):
                    assert me == home or me.startswith(f"{home}."), f"{path}:{line}: {library} belongs to {home}"


def test_rooms_and_files_stay_small() -> None:
    for folder in {path.parent for path in FILES} - {ROOT}:
        found = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(found) <= MAX_FILES, f"{folder} has {len(found)} files; give it a wall"
    for path in FILES + TESTS:
        lines, limit = len(path.read_text().splitlines()), MAX_LINES_OF_TRAIN if path.name == "train.py" else MAX_LINES
        assert lines <= limit, f"{path} has {lines} lines, at most {limit} are allowed"


def test_a_package_says_its_subject_and_exports_nothing() -> None:
    for path in FILES:
        if path.name == "__init__.py":
            (docstring,) = ast.parse(path.read_text()).body
            assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant), path


def test_environment_is_read_in_one_place() -> None:
    for path in FILES:
        if path.name != "environment.py":
            text = path.read_text()
            assert "os.environ" not in text and "getenv" not in text, f"{path} reads the environment"


def test_only_the_accelerator_asks_for_a_device_type() -> None:
    for path in FILES:
        if room_of(module_of(path)) != "tessera.utils.machine":
            asked = [line for line in path.read_text().splitlines() if DEVICE_TYPE.search(line)]
            assert not asked, f"{path}: {asked}; what differs between devices belongs to utils/machine/accelerator.py"


def test_train_has_few_forks() -> None:
    tree = ast.parse((ROOT / "train.py").read_text())
    train = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "train")
    forks = [n for n in ast.walk(train) if isinstance(n, (ast.If, ast.IfExp, ast.Match))]
    assert len(forks) <= MAX_FORKS_IN_TRAIN, f"train() has {len(forks)} forks, at most {MAX_FORKS_IN_TRAIN} are allowed"
