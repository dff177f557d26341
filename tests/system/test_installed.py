"""The wheel in an environment of its own, used from a project whose modules have the names of this one's folders."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import tessera
from tests.system.launch import ROOT, Outcome, run_command

STRANGER = "raise RuntimeError('the module of another project was imported')\n"
STRANGERS = {"utils.py": "utils.py", "train.py": "train.py", "models": "models/__init__.py", "data": "data/__init__.py"}
ON_CPU = ("--device", "cpu")
NOT_IN_AN_ARCHIVE = (".*", "__pycache__", "*.egg-info", "build", "dist", "datasets", "runs", "shared", "yolo*.pt")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel that was built from that archive alone."""
    if shutil.which("uv") is None:
        pytest.skip("needs uv, which builds")
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "clone", symlinks=True, ignore=shutil.ignore_patterns(*NOT_IN_AN_ARCHIVE))
    built = run_command(["uv", "build", "--quiet", "--out-dir", str(folder), str(folder / "clone")])
    if "Failed to fetch" in built.err:
        pytest.skip("needs a package index, or a cache of uv that has setuptools")
    assert built.code == 0, built.said
    return folder


@pytest.fixture(scope="module")
def python(archives: Path) -> Path:
    """The interpreter of an environment with the wheel and nothing else; what it depends on it takes from ours."""
    environment = archives / "environment"
    (wheel,) = archives.glob("*.whl")
    python = environment / "bin" / "python"
    install = ["uv", "pip", "install", "--quiet", "--no-deps", "--compile-bytecode", "--python", str(python)]
    for command in (["uv", "venv", "--quiet", "--python", sys.executable, str(environment)], [*install, str(wheel)]):
        done = run_command(command)
        assert done.code == 0, done.said
    (site,) = environment.glob("lib/*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    for path in (site / "tessera").rglob("*"):
        path.chmod(path.stat().st_mode & ~0o222)
    return python


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for module in STRANGERS.values():
        (folder / module).parent.mkdir(parents=True, exist_ok=True)
        (folder / module).write_text(STRANGER)
    return folder


def run(python: Path, folder: Path, *command: str, code: int = 0) -> Outcome:
    """A command of that environment in a folder, with the variables of a user's shell."""
    env = {"PYTHONPATH": "", "TESSERA_DATASETS": "", "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    done = run_command(command, cwd=folder, env=env, timeout=600)
    assert done.code == code, done.said
    return done


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_archives_hold_the_files_and_the_licences(archives: Path) -> None:
    (wheel,), (archive,) = archives.glob("*.whl"), archives.glob("*.tar.gz")
    files = {
        f"tessera/{path.relative_to(top)}"
        for top, folders in (
            (ROOT, ("data", "models", "utils", "analysis", "deploy")),
            (ROOT / "tessera", ("commands",)),
        )
        for folder in folders
        for path in (top / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".html", ".css", ".js")
    } | {
        f"tessera/{name}" for name in ("__init__.py", "__init__.pyi", "__main__.py", "py.typed", "models/tessera-n.pt")
    }
    with zipfile.ZipFile(wheel) as opened:
        inside = set(opened.namelist())
        about = next(name for name in inside if name.endswith(".dist-info/METADATA")).removesuffix("METADATA")
        metadata = opened.read(f"{about}METADATA").decode()
        for name in ("LICENSE", "NOTICE"):
            assert opened.read(f"{about}licenses/{name}") == (ROOT / name).read_bytes()
    assert {name for name in inside if not name.startswith(about)} == files
    assert f"\nVersion: {tessera.__version__}\n" in metadata and "\nLicense-Expression: Apache-2.0\n" in metadata
    assert all(f"\nLicense-File: {name}\n" in metadata for name in ("LICENSE", "NOTICE"))
    with tarfile.open(archive) as opened:
        members = {member.name.partition("/")[2]: member for member in opened.getmembers()}
    assert "tests" not in {name.partition("/")[0] for name in members}
    assert files | {"LICENSE", "NOTICE"} <= members.keys() and all(
        member.isfile() or member.isdir() for member in members.values()
    )


@pytest.mark.slow
def test_every_command_works_beside_modules_of_the_same_names(python: Path, project: Path) -> None:
    (site,) = python.parents[1].glob("lib/*/site-packages")
    before = contents(site)
    best = Path("runs", "train", "exp", "weights", "best.pt")
    small = ("--data", "shapes.yaml", "--imgsz", "64", "--workers", "1", "--noplots", "--loggers", "none", *ON_CPU)
    torchrun = (str(python), *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tessera"))

    trained = run(python, project, "tessera", "train", *small, "--epochs", "1")
    assert f"Detect: tessera detect --weights {project / best} --source …" in trained.out, trained.said
    run(python, project, *torchrun, "train", *small, "--epochs", "1", "--name", "two")
    assert (project / "runs" / "train" / "two" / "weights" / "best.pt").is_file()
    run(python, project, str(python), "-m", "tessera", "val", "--weights", str(best), *ON_CPU)
    image = min((project / "datasets" / "shapes" / "images" / "val").iterdir())
    flags = ("--source", str(image), "--conf-thres", "0.001", "--save-json")
    run(python, project, "tessera", "detect", "--weights", str(best), *flags, *ON_CPU)
    run(python, project, "tessera", "export", "--weights", str(best), *ON_CPU)
    line = (project / "runs" / "detect" / "exp" / "predictions.jsonl").read_text().splitlines()[1]
    assert len(json.loads(line)["detections"]) > 10
    assert {path.name for path in project.iterdir()} == {*STRANGERS, "datasets", "runs"}
    assert contents(site) == before
