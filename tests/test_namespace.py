"""One namespace, in a clone and installed: every module has one name, and a user's own `utils.py` stays theirs."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tessera

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"data", "models", "utils", "train", "val", "detect", "export", "compare"}  # tessera.… is their only name
WHAT_IT_SAYS = """
from tessera.utils.config import HYPS_DIR
from tessera.utils.environment import datasets_dir
from tessera.utils.flags.program import HOME, called, git_revision, installed_by, started
print(HOME.name, HYPS_DIR.relative_to(HOME), datasets_dir().resolve(), git_revision())
print(called("val.py"), "|", started("detect.py"), "|", installed_by("export"))
"""
THE_CODE = "from tessera.utils.ranks.consistency import code_version; print(code_version())"
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


def python(folder: Path, *words: str, path: Path = ROOT, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Python in a user's folder, with `path` on sys.path and TESSERA_DATASETS not set."""
    environment = {name: value for name, value in os.environ.items() if name != "TESSERA_DATASETS"}
    environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=check
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


# ------------------------------------------------------------------- as it is installed, without a clone around it


def installed(folder: Path, path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, *words, path=path, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "tessera", folder / "tessera", ignore=shutil.ignore_patterns("__pycache__"))
    about = folder / "a_name-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: a-name\nVersion: 1.0\n")
    (about / "top_level.txt").write_text("tessera\n")
    return folder


def test_its_own_files_are_inside_and_datasets_go_to_the_working_directory(site: Path, tmp_path: Path) -> None:
    found = installed(tmp_path, site, "-c", WHAT_IT_SAYS)
    first, second = found.stdout.splitlines()
    assert first == f"tessera data/hyps {tmp_path.resolve() / 'datasets'} None", found.stderr
    assert second == "tessera val | tessera detect | pip install 'a-name[export]'"


def test_its_code_is_that_of_the_clone(site: Path, tmp_path: Path) -> None:
    packaged, cloned = (installed(tmp_path, path, "-c", THE_CODE).stdout for path in (site, ROOT))
    assert packaged == cloned != ""


def test_commands_call_themselves_as_they_were_started(site: Path, tmp_path: Path) -> None:
    assert installed(tmp_path, site, "-m", "tessera", "export", "--help").stdout.startswith(
        "usage: tessera export [-h]"
    )
    assert installed(tmp_path, site, "-m", "tessera", "-h").stdout.startswith(
        "usage: tessera {train,val,detect,export,compare}"
    )
    wrong = installed(tmp_path, site, "-m", "tessera", "val", "--imgs", "-1", "--wieghts", "x")
    said = "error: tessera val: unknown argument '--wieghts'. Did you mean '--weights'? See tessera val --help.\n"
    assert (wrong.returncode, wrong.stderr) == (2, said)


def test_measuring_and_detecting_need_no_pandas_and_no_tensorboard(site: Path, tmp_path: Path) -> None:
    """What a training alone uses is not imported."""
    trainings = "{'pandas', 'tensorboard', 'tessera.utils.training.start'}"
    program = f"import sys, tessera; tessera.val, tessera.detect; print(sorted({trainings} & sys.modules.keys()))"
    assert installed(tmp_path, site, "-c", program).stdout == "[]\n"


@pytest.mark.parametrize("said", ["libGL.so.1: cannot open shared object file", "No module named 'cv2'"])
def test_opencv_that_does_not_load_is_one_message(said: str, site: Path, tmp_path: Path) -> None:
    """As opencv-python on a server without libraries of a desktop, or neither of the two packages."""
    (tmp_path / "cv2.py").write_text(f"raise ImportError({said!r})\n")
    found = installed(tmp_path, site, "-m", "tessera", "detect", "--source", "pictures")
    assert found.returncode == 1
    assert found.stderr.startswith(f"error: OpenCV cannot be imported ({said}). ") and found.stderr.count("\n") == 1
    assert "opencv-python-headless" in found.stderr
