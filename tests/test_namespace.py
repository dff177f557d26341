"""The namespace `tessera`, in a clone and installed: one name per module, and none that hides a user's `utils.py`."""

from __future__ import annotations

import ast
import dataclasses
import shutil
import sys
from pathlib import Path

import pytest

import tessera
from tessera.analysis.comparison.flags import CompareConfig
from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.inference.flags import DetectConfig
from tessera.utils.config import TrainConfig
from tessera.utils.flags.options import GROUPS, Options
from tessera.utils.flags.val import ValConfig
from tests import api_stub
from tests.system.launch import ROOT, Outcome, run_command

# tessera.… is their only name
OUTSIDE = {"data", "models", "utils", "analysis", "deploy", "train", "val", "detect", "export", "compare"}
PATHS_AND_NAMES = """
from tessera.utils.config import HYPS_DIR
from tessera.utils.environment import datasets_dir
from tessera.utils.ranks.consistency import code_version
from tessera.utils.flags.program import HOME, called, git_revision, installed_by, started
print(HOME.name, HYPS_DIR.relative_to(HOME), datasets_dir().resolve(), git_revision())
print(code_version())
print(called("val.py"), "|", started("detect.py"), "|", installed_by("export"))
"""
EVERY_MODULE = """
import importlib, sys
from pathlib import Path
root = Path(sys.argv[1])
folders = ("data", "models", "utils", "analysis", "deploy")
for folder in folders:
    for file in (root / folder).rglob("*.py"):
        if file.name == "ray_train.py":  # needs ray
            continue
        parts = file.relative_to(root).with_suffix("").parts
        importlib.import_module(".".join(("tessera", *parts)).removesuffix(".__init__"))
for command in ("train", "val", "detect", "export", "compare"):
    importlib.import_module(f"tessera.commands.{command}")
names = {}
for name, module in sys.modules.items():
    if file := getattr(module, "__file__", None):
        names.setdefault(Path(file).resolve(), []).append(name)
inside = (file for folder in folders for file in (root / folder).rglob("*.py") if file.name != "ray_train.py")
for file in (*root.glob("[a-z]*.py"), *inside):
    name = names.pop(file)
    assert len(name) == 1 and name[0].startswith("tessera."), (file, name)
print("one name each")
"""


def python(folder: Path, *words: str, path: Path = ROOT) -> Outcome:
    """Run Python in a user's folder, with `path` on sys.path and TESSERA_DATASETS not set."""
    return run_command([sys.executable, *words], cwd=folder, env={"PYTHONPATH": str(path), "TESSERA_DATASETS": ""})


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


@pytest.mark.slow
def test_every_module_is_loaded_under_one_name() -> None:
    assert python(ROOT, "-c", EVERY_MODULE, str(ROOT)).out == "one name each\n"


@pytest.mark.slow
def test_a_projects_own_modules_stay_its_own(project: Path) -> None:
    """Also where the clone comes first in sys.path, all but the names of the commands' files."""
    (project / "mine.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "import data, models, utils\n"
        "import tessera\n"
        "assert tessera.Detector.__module__ == 'tessera.deploy.inference.detector'\n"
        "assert tessera.train.__module__ == 'tessera.commands.train'\n"
        "print(data.whose, models.whose, utils.whose)\n"
    )
    assert python(project, "mine.py").out == "mine mine mine\n"


def test_a_program_beside_a_clone_of_that_name_imports_the_package(project: Path) -> None:
    """Without __init__.py the clone's folder would be a namespace package, which has nothing but submodules."""
    (project / "tessera").symlink_to(ROOT)
    (project / "mine.py").write_text(
        "import tessera, utils\n"
        "assert tessera.Detector.__module__ == 'tessera.deploy.inference.detector'\n"
        "print(tessera.__version__, tessera.train.__module__, utils.whose)\n"
    )
    assert python(project, "mine.py", path=project).out == f"{tessera.__version__} tessera.commands.train mine\n"


def test_a_zip_unpacked_on_windows_has_text_in_place_of_links(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns(".*", "__pycache__", "datasets", "runs", "tests", "docs", "*.pt")
    clone = shutil.copytree(ROOT, tmp_path / "clone", symlinks=True, ignore=left_out)
    for link in [path for path in (clone / "tessera").rglob("*") if path.is_symlink()]:
        target = str(link.readlink())
        link.unlink()
        link.write_text(target)
    assert "--weights" in python(clone, "train.py", "--help", path=clone).out
    program = "import tessera; print(tessera.Detector.__name__, tessera.val.__module__)"
    assert python(tmp_path, "-c", program, path=clone).out == "Detector tessera.commands.val\n"


def test_the_package_is_light_and_lists_its_names(project: Path) -> None:
    program = (
        "import sys, tessera\n"
        "print(sorted(m for m in sys.modules if m.startswith('tessera')), 'torch' in sys.modules, dir(tessera))"
    )
    names = ["Detector", "__version__", "compare", "detect", "export", "train", "val"]
    assert (
        python(project, "-c", program).out
        == f"['tessera', 'tessera.utils', 'tessera.utils.flags', 'tessera.utils.flags.version'] False {names}\n"
    )
    unknown = python(project, "-c", "import tessera\ntry: tessera.trian\nexcept AttributeError as error: print(error)")
    assert unknown.out == f"module 'tessera' has no attribute 'trian'; it has {', '.join(names)}\n"


@pytest.mark.parametrize("command", ["train", "val", "detect", "export", "compare"])
def test_a_command_by_its_file_and_by_its_name_is_the_same(project: Path, command: str) -> None:
    by_file = python(project, str(ROOT / f"{command}.py"), "--help").out
    assert python(project, "-m", "tessera", command, "--help").out == by_file
    assert "--weights" in by_file or command == "compare"


def test_an_unknown_command_is_an_error(project: Path) -> None:
    usage = "usage: python -m tessera {train,val,detect,export,compare} [flags]\n"
    for words, message in (
        ((), "error: no command is given.\n"),
        (("trian",), "error: no command is called 'trian'. Did you mean 'train'?\n"),
    ):
        done = python(project, "-m", "tessera", *words)
        assert done.code == 2 and done.err.startswith(f"{message}{usage}"), done.said


@pytest.mark.slow
def test_the_version_is_printed_without_a_command(project: Path) -> None:
    line = python(project, "-m", "tessera", "--version").out
    assert line.startswith(f"tessera {tessera.__version__}") and ", torch " in line and line.count("\n") == 1


# ------------------------------------------------------------------- as it is installed, without a clone around it


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "tessera", folder / "tessera", ignore=shutil.ignore_patterns("__pycache__"))
    about = folder / "a_name-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: a-name\nVersion: 1.0\n")
    (about / "top_level.txt").write_text("tessera\n")
    return folder


@pytest.mark.slow
def test_its_own_files_are_inside_and_datasets_go_to_the_working_directory(site: Path, tmp_path: Path) -> None:
    found = python(tmp_path, "-c", PATHS_AND_NAMES, path=site)
    first, code, second = found.out.splitlines()
    assert first == f"tessera data/hyps {tmp_path.resolve() / 'datasets'} None", found.said
    assert second == "tessera val | tessera detect | pip install 'a-name[export]'"
    assert code == python(tmp_path, "-c", PATHS_AND_NAMES).out.splitlines()[1], "the code is that of the clone"


def test_commands_call_themselves_as_they_were_started(site: Path, tmp_path: Path) -> None:
    assert python(tmp_path, "-m", "tessera", "-h", path=site).out.startswith(
        "usage: tessera {train,val,detect,export,compare}"
    )
    wrong = python(tmp_path, "-m", "tessera", "val", "--imgs", "-1", "--wieghts", "x", path=site)
    said = "error: tessera val: unknown argument '--wieghts'. Did you mean '--weights'? See tessera val --help.\n"
    assert (wrong.code, wrong.err) == (2, said)


@pytest.mark.slow
def test_validation_and_detection_need_no_pandas_and_no_tensorboard(site: Path, tmp_path: Path) -> None:
    """What a training alone uses is not imported."""
    trainings = "{'pandas', 'tensorboard', 'tessera.utils.training.setup'}"
    program = f"import sys, tessera; tessera.val, tessera.detect; print(sorted({trainings} & sys.modules.keys()))"
    program += "; tessera.train; print('pandas' in sys.modules)"  # the report of rank 0 uses it
    assert python(tmp_path, "-c", program, path=site).out == "[]\nFalse\n"


@pytest.mark.slow
def test_opencv_that_does_not_load_is_one_message(site: Path, tmp_path: Path) -> None:
    """As opencv-python on a server without libraries of a desktop."""
    reason = "libGL.so.1: cannot open shared object file"
    (tmp_path / "cv2.py").write_text(f"raise ImportError({reason!r})\n")
    found = python(tmp_path, "-m", "tessera", "detect", "--source", "images", path=site)
    assert found.code == 1 and "opencv-python-headless" in found.err
    assert found.err.startswith(f"error: OpenCV cannot be imported ({reason}). ") and found.err.count("\n") == 1


def test_the_stub_of_the_python_api_is_of_these_flags() -> None:
    """So are `help()` and the signatures at run time, of which the stub is made."""
    assert api_stub.STUB.read_text() == api_stub.content(), "run: python -m tests.api_stub && ruff format tessera"


@pytest.mark.parametrize("config", [TrainConfig, ValConfig, DetectConfig, ExportConfig, CompareConfig])
def test_every_flag_is_in_one_group_of_the_help(config: type[Options]) -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    fields = [field.name for field in dataclasses.fields(config)]
    assert len(set(grouped)) == len(grouped) and set(fields) <= set(grouped)
