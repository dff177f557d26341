"""Downloads from a real server that misbehaves on demand."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.data.source.download import fetch, locked
from tessera.utils import http_client
from tessera.utils.errors import UserError
from tessera.utils.http_client import NetworkLimits
from tests.at_once import at_once
from tests.file_server import FileServer

BODY = np.random.default_rng(0).bytes(300_000)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "LIMITS", NetworkLimits(pause_s=0.01, timeout_s=5.0))


@pytest.fixture
def one_try(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "LIMITS", replace(http_client.LIMITS, attempts=1))


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


@pytest.mark.usefixtures("one_try")
def test_complete_part_is_not_fetched_again(server: FileServer, tmp_path: Path) -> None:
    server.break_after = [len(BODY) - 1]
    with pytest.raises(UserError):
        fetch(server.url, tmp_path / "data.zip")
    with (tmp_path / "data.zip.part").open("ab") as part:
        part.write(BODY[-1:])
    assert fetch(server.url, tmp_path / "data.zip").read_bytes() == BODY
    assert len(server.seen) == 1


@pytest.mark.parametrize("etag, body", [('"two"', BODY[::-1][:-7]), ("", BODY[::-1][:-7]), ("", BODY[:5000])])
def test_changed_file_is_not_joined(
    server: FileServer, tmp_path: Path, etag: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.etag = '"one"' if etag else ""
    server.break_after = [100_000]
    with monkeypatch.context() as one_try, pytest.raises(UserError):
        one_try.setattr(http_client, "LIMITS", replace(http_client.LIMITS, attempts=1))
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


def test_target_that_cannot_be_written(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="Cannot write"):
        fetch(server.url, tmp_path / "file" / "data.zip")


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


def test_one_holds_a_lock_at_a_time_and_none_leaves_its_file(tmp_path: Path) -> None:
    holders, most = [0], 0

    def hold() -> None:
        nonlocal most
        for _ in range(50):
            with locked(tmp_path / "deep" / "lock"):
                holders.append(1)
                time.sleep(0)  # lets another go on
                most = max(most, sum(holders))
                holders.pop()

    at_once([hold] * 4)
    assert most == 1 and not list((tmp_path / "deep").iterdir())
