"""One namespace: every module has one name, and a user's own `utils.py`, `models/` and `data/` stay theirs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tessera

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"data", "models", "utils", "train", "val", "detect", "export", "compare"}  # tessera.… is their only name
EVERY_MODULE = """
import importlib, sys
from pathlib import Path
root = Path(sys.argv[1])
for folder in ("data", "models", "utils"):
    for file in (root / folder).rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        importlib.import_module(".".join(("tessera", *parts)).removesuffix(".__init__"))
for command in ("train", "val", "detect", "export", "compare"):
    importlib.import_module(f"tessera.commands.{command}")
names = {}
for name, module in sys.modules.items():
    if file := getattr(module, "__file__", None):
        names.setdefault(Path(file).resolve(), []).append(name)
for file in (*root.glob("*.py"), *(p for folder in ("data", "models", "utils") for p in (root / folder).rglob("*.py"))):
    name = names.pop(file)
    assert len(name) == 1 and name[0].startswith("tessera."), (file, name)
print("one name each")
"""


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python in a user's folder, which knows Tessera by its path alone."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=True
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "utils.py").write_text("whose = 'mine'\n")
    (tmp_path / "train.py").write_text("whose = 'mine'\n")
    for package in ("models", "data"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("whose = 'mine'\n")
    return tmp_path


def test_no_file_imports_a_module_by_another_name() -> None:
    for path in (*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert not {name.partition(".")[0] for name in names} & OUTSIDE, f"{path}:{node.lineno}"


def test_every_module_is_loaded_under_one_name() -> None:
    assert python(ROOT, "-c", EVERY_MODULE, str(ROOT)).stdout == "one name each\n"


@pytest.mark.parametrize("last", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["clone first", "clone last"])
def test_a_projects_own_modules_stay_its_own(project: Path, last: bool) -> None:
    """Also where the clone comes first in sys.path, all but the names of the commands' files."""
    (project / "mine.py").write_text(
        f"import sys\n{'' if last else f'sys.path.insert(0, {str(ROOT)!r})'}\n"
        "import data, models, utils\n"
        "import tessera\n"
        "assert tessera.Detector.__module__ == 'tessera.utils.inference.detector'\n"
        "assert tessera.train.__module__ == 'tessera.commands.train'\n"
        "print(data.whose, models.whose, utils.whose)\n"
    )
    assert python(project, "mine.py").stdout == "mine mine mine\n"


def test_the_door_is_light_and_says_what_is_behind_it(project: Path) -> None:
    program = (
        "import sys, tessera\n"
        "print(sorted(m for m in sys.modules if m.startswith('tessera')), 'torch' in sys.modules, dir(tessera))"
    )
    names = ["Detector", "__version__", "compare", "detect", "export", "train", "val"]
    assert (
        python(project, "-c", program).stdout
        == f"['tessera', 'tessera.utils', 'tessera.utils.flags', 'tessera.utils.flags.version'] False {names}\n"
    )
    unknown = python(project, "-c", "import tessera\ntry: tessera.trian\nexcept AttributeError as error: print(error)")
    assert unknown.stdout == f"module 'tessera' has no attribute 'trian'; it has {', '.join(names)}\n"


@pytest.mark.parametrize("command", ["train", "val", "detect", "export", "compare"])
def test_a_command_by_its_file_and_by_its_name_is_the_same(project: Path, command: str) -> None:
    by_file = python(project, str(ROOT / f"{command}.py"), "--help").stdout
    assert python(project, "-m", "tessera", command, "--help").stdout == by_file
    assert "--weights" in by_file or command in ("compare", "convert")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "error: no command is given.\n"),
        (("trian",), "error: no command is called 'trian'. Did you mean 'train'?\n"),
        (("--epochs", "3"), "error: no command is called '--epochs'.\n"),
    ],
)
def test_a_command_that_is_none_is_an_error(project: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        python(project, "-m", "tessera", *words)
    assert caught.value.returncode == 2
    assert caught.value.stderr.startswith(
        f"{said}usage: python -m tessera {{train,val,detect,export,compare}} [flags]\n"
    )


def test_the_version_is_told_without_a_command(project: Path) -> None:
    line = python(project, "-m", "tessera", "--version").stdout
    assert line.startswith(f"tessera {tessera.__version__}") and ", torch " in line and line.count("\n") == 1
