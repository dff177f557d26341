"""Downloads from servers that misbehave, and from hostile ones; archives: safe unpacking and refusals."""

from __future__ import annotations

import gzip
import io
import re
import shutil
import ssl
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.deploy.foreign import download
from tessera.deploy.foreign.download import NetworkLimits, fetch, unpack
from tessera.utils.errors import UserError
from tests.at_once import at_once
from tests.file_server import FileServer
from tests.raw_server import raw_server

BODY = np.random.default_rng(0).bytes(300_000)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LIMITS", NetworkLimits(pause_s=0.01, timeout_s=5.0))


@pytest.fixture
def one_try(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LIMITS", replace(download.LIMITS, attempts=1))


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer(BODY).running() as server:
        yield server


def test_whole_file_and_nothing_else(server: FileServer, tmp_path: Path) -> None:
    target = fetch(server.url, tmp_path / "deep" / "data.zip")
    assert target.read_bytes() == BODY
    assert list(target.parent.iterdir()) == [target]
    target.write_bytes(b"mine")
    assert fetch(server.url, target).read_bytes() == b"mine" and len(server.seen) == 1, "it is not fetched again"


def test_an_interrupted_transfer_is_resumed(server: FileServer, tmp_path: Path) -> None:
    server.break_after = [100_000, 50_000]
    assert fetch(server.url, tmp_path / "data.zip").read_bytes() == BODY
    assert server.seen == [None, "bytes=100000-", "bytes=150000-"]
    server.break_after = [30_000] * 9  # progress renews the attempts
    assert fetch(server.url, tmp_path / "other.zip").read_bytes() == BODY


@pytest.mark.usefixtures("one_try")
def test_the_next_call_resumes(server: FileServer, tmp_path: Path) -> None:
    server.break_after = [100_000]
    with pytest.raises(UserError, match="the connection ended after 100,000 of 300,000 bytes"):
        fetch(server.url, tmp_path / "data.zip")
    assert not (tmp_path / "data.zip").exists()
    assert fetch(server.url, tmp_path / "data.zip").read_bytes() == BODY
    assert server.seen == [None, "bytes=100000-"]


@pytest.mark.usefixtures("one_try")
def test_part_of_another_address_is_not_continued(server: FileServer, tmp_path: Path) -> None:
    server.break_after = [100_000]
    with pytest.raises(UserError):
        fetch(server.url, tmp_path / "data.zip")
    fetch(server.url + "?v=2", tmp_path / "data.zip")
    assert server.seen == [None, None]


@pytest.mark.parametrize("etag, body", [('"two"', BODY[::-1][:-7]), ("", BODY[::-1][:-7]), ("", BODY[:5000])])
def test_changed_file_is_not_joined(
    server: FileServer, tmp_path: Path, etag: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.etag = '"one"' if etag else ""
    server.break_after = [100_000]
    with monkeypatch.context() as one_try, pytest.raises(UserError):
        one_try.setattr(download, "LIMITS", replace(download.LIMITS, attempts=1))
        fetch(server.url, tmp_path / "data.zip")
    server.etag, server.body = etag, body
    assert fetch(server.url, tmp_path / "data.zip").read_bytes() == server.body


@pytest.mark.parametrize(
    "manners",
    [{"ranges": False, "break_after": [100_000]}, {"length": False}, {"status": [503, 429]}],
    ids=["no ranges", "unknown length", "transient answers"],
)
def test_servers_that_make_it_hard(server: FileServer, tmp_path: Path, manners: dict[str, Any]) -> None:
    for name, value in manners.items():
        setattr(server, name, value)
    assert fetch(server.url, tmp_path / "data.zip").read_bytes() == BODY


def test_server_without_ranges_does_not_keep_us_for_ever(server: FileServer, tmp_path: Path) -> None:
    server.ranges = False
    server.break_after = [100_000] * 50
    with pytest.raises(UserError, match="connection"):
        fetch(server.url, tmp_path / "data.zip")
    assert len(server.seen) <= 4


@pytest.mark.parametrize(("status", "what"), [(404, "404.*Check the address"), (403, "403.*your access")])
def test_refusals_are_final(server: FileServer, tmp_path: Path, status: int, what: str) -> None:
    server.status = [status]
    with pytest.raises(UserError, match=what):
        fetch(server.url, tmp_path / "data.zip")
    assert len(server.seen) == 1


@pytest.mark.parametrize("length", [True, False])
def test_size_limit(server: FileServer, tmp_path: Path, length: bool) -> None:
    server.length = length
    with pytest.raises(UserError, match="limit of 1,000"):
        fetch(server.url, tmp_path / "data.zip", max_bytes=1000)
    assert not (tmp_path / "data.zip").exists()


@pytest.mark.parametrize("name", ["data.zip.part", "data.zip.part.json"])
def test_a_link_is_not_followed(server: FileServer, tmp_path: Path, name: str) -> None:
    (mine := tmp_path / "mine").write_text("mine")
    (tmp_path / name).symlink_to(mine)
    with suppress(UserError):
        fetch(server.url, tmp_path / "data.zip")
    assert mine.read_text() == "mine"


def test_a_file_that_is_not_accepted_leaves_nothing_behind(server: FileServer, tmp_path: Path) -> None:
    target, looked = tmp_path / "data.zip", []

    def accept(part: Path) -> None:
        looked.append(part.read_bytes())
        assert not target.exists()
        if looked[-1] != BODY:
            raise UserError("not that one")

    server.body = BODY[::-1]
    with pytest.raises(UserError, match="not that one"):
        fetch(server.url, target, accept=accept)
    assert not target.exists() and sum(path.stat().st_size for path in tmp_path.glob("*.part")) == 0
    server.body = BODY
    assert fetch(server.url, target, accept=accept).read_bytes() == BODY
    assert looked == [BODY[::-1], BODY] and server.seen == [None, None]
    fetch(server.url, target, accept=accept)  # what is there was accepted
    assert len(looked) == 2 and list(tmp_path.iterdir()) == [target]


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A certificate for 127.0.0.1, which this process trusts."""
    if not (openssl := shutil.which("openssl")):
        pytest.skip("needs the command openssl, which makes a certificate")
    made, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=127.0.0.1"
    words += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {made}"
    subprocess.run([openssl, *words.split()], check=True, capture_output=True, timeout=60)
    monkeypatch.setenv("SSL_CERT_FILE", str(made))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    return context


def test_a_redirect_to_another_host_keeps_https_and_the_place_to_resume_at(
    server: FileServer, tls: ssl.SSLContext, tmp_path: Path
) -> None:
    """As GitHub's releases do; the second host sends on, the first one knows no file."""
    with FileServer(b"", tls).running() as first, FileServer(BODY, tls).running() as second:
        first.location = f"{second.folder}storage?{'signed' * 200}"
        second.break_after = [100_000]
        assert fetch(first.url, tmp_path / "data.zip").read_bytes() == BODY
        assert second.seen == [None, "bytes=100000-"]
        first.location = server.url
        with pytest.raises(
            UserError, match=r"Cannot download https://.*: it redirects to 'http:.*, which is not https"
        ):
            fetch(first.url, tmp_path / "other.zip")
        assert not (tmp_path / "other.zip").exists()


def test_two_at_once(server: FileServer, tmp_path: Path) -> None:
    results = at_once([lambda: fetch(server.url, tmp_path / "data.zip").read_bytes()] * 4)
    assert results == [BODY] * 4 and len(server.asked) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["data.zip"]


OK = b"HTTP/1.1 200 OK\r\n"


def test_a_silent_server_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LIMITS", NetworkLimits(2, 0.01, 0.5))
    with (
        raw_server([OK + b'ETag: "a"\r\nContent-Length: 1000\r\n\r\n', b"x", 60.0]) as server,
        pytest.raises(UserError, match=r"timed out.*command again to resume"),
    ):
        fetch(server.url, tmp_path / "data.zip")
    assert len(server.requests) <= 4


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://[\r\n\r\n", "redirects to no address"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://a:99999999/\r\n\r\n", "redirects to no address"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://" + b"a" * 64 + b"/\r\n\r\n", "redirects to no address"),
        (b"HTTP/1.1 302 Found\r\nLocation: ftp://a/b\r\n\r\n", "redirects to no address"),
        (b"HTTP/1.1 302 Found\r\nLocation: SELF?" + b"x" * 5000 + b"\r\n\r\n", "more than 10 times"),
        (b"HTTP/1.1 302 Found\r\nLocation: SELF\r\n\r\n", "more than 10 times"),
        (b"HTTP/1.1 302 Found\r\nLocation: SELF\r\nContent-Length: 99999999\r\n\r\n" + bytes(999), "than 10 times"),
        (b"HTTP/1.1 404 \x1b[31m" + b"x" * 9999 + b"\r\n\r\n", r"404 \\x1b\[31mxxx.*Check the address"),
        (b"HTTP/1.1 99999999 no\r\n\r\n", "broke"),
        (b"SSH-2.0-OpenSSH\r\n", "broke"),
        (OK + b"Content-Length: " + b"9" * 6000 + b"\r\n\r\n", ""),
        (OK + b"Content-Encoding: GZip\r\n\r\n", r"sends it encoded \(gzip\), expected identity"),
        (OK + b"Content-Length: -5\r\n\r\nabc", ""),
        (OK + b"".join(b"A%d: b\r\n" % n for n in range(200)) + b"\r\n", "broke"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nmany\r\n", "broke"),
        (OK + b"ETag: \x01\r\nContent-Length: 99\r\n\r\nabc", "ended after 3 of 99"),
    ],
)  # fmt: skip
def test_answers_that_are_not_http(tmp_path: Path, answer: bytes, message: str) -> None:
    with raw_server([answer]) as server:
        try:
            fetch(server.url, tmp_path / "data.zip")
        except UserError as error:
            assert len(str(error)) < 800 and str(error).replace("\n", "").isprintable()
            found = str(error)
        else:
            found = ""
    assert re.search(message, found), found


@pytest.mark.parametrize(
    "url",
    ["http://[", "http://a:b/", "http://a:99999/", "http://a/\x1b[31m", "http://a b/", "http://é/", "http://.../",
     f"http://{'a' * 64}/", f"http://a/{'b' * 5000}", "http://a\ud800/", "https://@/", "http://a/\u202e",
     "file:///etc/passwd", "ftp://a/b.zip"],
)  # fmt: skip
def test_addresses_that_are_none(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match="Cannot download") as error:
        fetch(url, tmp_path / "data.zip")
    assert str(error.value).isprintable() and len(str(error.value)) < 400


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
    refuse(tmp_path / "a", r"damaged or encrypted \((data follow|bad checksum)")


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


def test_not_an_archive(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"<html>Not found</html>")
    refuse(tmp_path / "a.zip", "expected a zip")
