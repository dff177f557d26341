"""Archives: safe unpacking and refusals."""

from __future__ import annotations

import gzip
import io
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from tessera.data.source import download
from tessera.data.source.download import unpack
from tessera.utils.errors import UserError

FILES = {"set/images/a.jpg": b"image", "set/labels/a.txt": b"", "set/readme": b"x" * 5000}


def make_zip(path: Path, files: dict[str, bytes] = FILES) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as pack:
        pack.mkdir("set/empty") if hasattr(pack, "mkdir") else pack.writestr("set/empty/", b"")
        for name, content in files.items():
            pack.writestr(name, content)
    return path


def make_tar(path: Path, files: dict[str, bytes] = FILES, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tape:  # type: ignore[call-overload]
        folder = tarfile.TarInfo("set/empty")
        folder.type = tarfile.DIRTYPE
        tape.addfile(folder)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tape.addfile(entry, io.BytesIO(content))
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refuse(archive: Path, what: str) -> None:
    """`unpack` raises, and leaves nothing anywhere."""
    place = archive.parent / "deep" / "place"
    with pytest.raises(UserError, match=what):
        unpack(archive, place / "target")
    assert list(place.iterdir()) == []
    assert {path.name for path in archive.parent.iterdir()} <= {archive.name, "deep", "secret"}


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tgz"])
def test_unpacks(tmp_path: Path, name: str) -> None:
    archive = tmp_path / name
    make_zip(archive) if name == "a.zip" else make_tar(archive, mode="w" if name == "a.tar" else "w:gz")
    unpack(archive, tmp_path / "out" / "target")
    assert content(tmp_path / "out" / "target") == FILES
    assert (tmp_path / "out" / "target" / "set" / "empty").is_dir()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["target"]


def test_merges_into_what_is_there(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "set" / "images").mkdir(parents=True)
    (target / "set" / "images" / "mine.jpg").write_bytes(b"mine")
    (target / "set" / "readme").write_bytes(b"old")
    unpack(make_zip(tmp_path / "a.zip"), target)
    assert content(target) == {**FILES, "set/images/mine.jpg": b"mine"}


def test_modes_of_the_archive_are_dropped(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as pack:
        info = zipfile.ZipInfo("run.sh")
        info.external_attr = (stat.S_IFREG | 0o4777) << 16
        pack.writestr(info, b"")
    unpack(tmp_path / "a.zip", tmp_path / "target")
    assert not (tmp_path / "target" / "run.sh").stat().st_mode & 0o7111


@pytest.mark.parametrize("name", ["../secret", "set/../../secret", "/tmp/secret", "a\\..\\..\\secret", "C:/secret"])
@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_path_that_leads_out(tmp_path: Path, make, name: str) -> None:  # type: ignore[no-untyped-def]
    refuse(make(tmp_path / "a", {"fine": b"1", name: b"2"}), "leads out of the folder")


def test_link_in_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as pack:
        info = zipfile.ZipInfo("link")
        info.create_system = 3
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        pack.writestr(info, "/etc/passwd")
    refuse(tmp_path / "a.zip", "link or a device")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_link_or_device_in_a_tar(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tape:
        entry = tarfile.TarInfo("odd")
        entry.type, entry.linkname = kind, "/etc/passwd"
        tape.addfile(entry)
    refuse(tmp_path / "a.tar", "link or a device")


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_bomb(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(download, "MAX_UNPACKED_BYTES", 1_000_000)
    archive = make(tmp_path / "a", {"bomb": bytes(5_000_000)})
    assert archive.stat().st_size < 50_000
    refuse(archive, "limit of 1,000,000 bytes")
    shutil.rmtree(tmp_path / "deep")
    monkeypatch.setattr(download, "MAX_MEMBERS", 10)
    refuse(make(tmp_path / "a", {f"{n}": b"" for n in range(20)}), "10 files")


NUMBERED = {f"{n}": bytes([n]) * 999 for n in range(1, 20)}  # each a header and two blocks of 512 bytes


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize(
    ("start", "content"), [(512 + 9 * 1536 + 100, b"\xff"), (512 + 9 * 1536, bytes(512))], ids=["flipped", "zeroed"]
)
def test_damaged_header_of_a_tar(tmp_path: Path, mode: str, start: int, content: bytes) -> None:
    """Python's own reader takes the rest of such an archive for nothing."""
    raw = bytearray(make_tar(tmp_path / "a", NUMBERED, "w").read_bytes())
    raw[start : start + len(content)] = content
    (tmp_path / "a").write_bytes(raw if mode == "w" else gzip.compress(raw))
    refuse(tmp_path / "a", r"damaged or encrypted \(data follow")


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("size", "-1536", "'odd' has the size -1536"),
        ("GNU.sparse.size", "many", "damaged"),
        ("path", "x" * 2**21, "a header of"),
    ],
)
def test_odd_extensions_of_a_tar(tmp_path: Path, field: str, value: str, what: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tape:
        entry = tarfile.TarInfo("odd")
        entry.pax_headers = {field: value}
        tape.addfile(entry)
    refuse(tmp_path / "a.tar", what)


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_names_that_are_too_long_or_too_deep(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    refuse(make(tmp_path / "a", {"x" * 256: b""}), "cannot be unpacked to .*too long")
    shutil.rmtree(tmp_path / "deep")
    refuse(make(tmp_path / "a", {"d/" * 1500 + "a": b""}), r"'d/d/.*lies more than 64 folders deep")


def test_file_under_a_file(tmp_path: Path) -> None:
    refuse(make_zip(tmp_path / "a.zip", {"a": b"", "a/b": b""}), "cannot be unpacked")


def test_not_an_archive(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"<html>Not found</html>")
    refuse(tmp_path / "a.zip", "expected a zip")
