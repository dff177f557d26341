"""File helpers: user paths, plain files, atomic writes, shared files."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import re
import socket
import tempfile
import time
from pathlib import Path
from typing import IO
from unittest.mock import Mock

import pytest

from tessera.utils.errors import ConfigError, UserError
from tessera.utils.files import (
    UMASK,
    SharedFile,
    absolute_path,
    atomic_write,
    locked,
    no_link,
    open_plain,
    reachable_path,
    remove_leftovers,
    special_file_kind,
    user_path,
    working_directory,
    write_whole,
)
from tests.at_once import at_once
from tests.leftover import leave_behind


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with atomic_write(path) as file:
        file.write(b"old")
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write(b"half of the n")
        raise RuntimeError
    assert path.read_bytes() == b"old" and path.stat().st_mode & 0o777 == 0o666 & ~UMASK
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_nobody_foresees_the_name_of_a_temporary_file_and_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    first, second = leave_behind(tmp_path / "file"), leave_behind(tmp_path / "file")
    assert first != second
    first.unlink()
    first.symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="is a link, expected a plain file"), open(first, "ab", opener=no_link):
        pass
    (tmp_path / "file").symlink_to(tmp_path / "mine")
    write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new" and (tmp_path / "mine").read_bytes() == b"mine"


@pytest.fixture
def leftover(tmp_path: Path) -> Path:
    return leave_behind(tmp_path / "file")


def test_a_leftover_is_removed_if_locks_need_a_writable_file(leftover: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS makes record locks of flock's, and refuses an exclusive one on a file that is open for reading (flock(2))."""
    real = fcntl.flock

    def flock(file: IO[bytes] | int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    video = leave_behind(leftover.with_name("a.mp4"), ".mp4")
    remove_leftovers(leftover.parent)
    assert not leftover.exists() and not video.exists()


def test_only_names_that_atomic_write_makes_are_leftovers(leftover: Path) -> None:
    host = leftover.name.split(".")[-2]
    others = [f".mine.{host}.tmp", f".{host}.tmp", f".a.Abcd1234.{host}.tmp", f".a.abcd12345.{host}.tmp", ".a.tmp"]
    others += [leftover.name[1:], leftover.name + ".b", ".file.abcd1234.x y.tmp"]
    for name in others:
        (leftover.parent / name).touch()
    for of_any_host in (False, True):
        remove_leftovers(leftover.parent, of_any_host=of_any_host)
        assert {path.name for path in leftover.parent.iterdir()} == {*others}


def test_leftovers_of_other_hosts_stay_unless_they_are_asked_for(leftover: Path) -> None:
    elsewhere = leftover.with_name(re.sub(r"[^.]+\.tmp$", "another-host.tmp", leftover.name))
    leftover.rename(elsewhere)
    remove_leftovers(elsewhere.parent)
    assert elsewhere.exists()
    with elsewhere.open("rb") as file:  # its writer is alive
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_leftovers(elsewhere.parent, of_any_host=True)
        assert elsewhere.exists()
    remove_leftovers(elsewhere.parent, of_any_host=True)
    assert not elsewhere.exists()


def test_an_unnamed_file_is_opened_by_others_and_no_file_in_its_place(tmp_path: Path) -> None:
    with tempfile.TemporaryFile(dir=tmp_path) as file, tempfile.TemporaryFile(dir=tmp_path) as other:
        file.write(b"what is shared")
        file.flush()
        shared = SharedFile.of(file)
        with shared.open("rb") as opened:
            assert opened.read() == b"what is shared"
            assert SharedFile.of(opened).identity == shared.identity
        with pytest.raises(FileNotFoundError, match="another file"):
            dataclasses.replace(SharedFile.of(other), identity=shared.identity).open("r+b")
    with pytest.raises(OSError):
        shared.open("rb")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\0b", r"--data: found 'a\\x00b', expected a path; none holds a NUL"),
        ("~nobody-of-that-name/a", "--data: found '~nobody-of-that-name/a', whose home directory"),
        ("data/" + "x" * 256, "--data: found 'data/xxx.*each name in it at most 255"),
        ("deep/" * 900, "at most 4,095 bytes"),
        ("\ud800", r"--data: found '\\ud800', expected a path; this is no text"),
        ("gs://bucket/a", "--data: found the address 'gs://bucket/a', expected a path of this machine"),
        (str(Path("s3://bucket/a")), "found the address 's3:/bucket/a'"),
    ],
)
def test_impossible_paths(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        user_path(text, "--data")
    assert len(str(error.value)) < 300


def test_paths_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/a", "x") == Path("/home/me/a") and user_path("a/~b", "x") == Path("a/~b")
    assert user_path("C:/a", "x") == Path("C:/a") and user_path("./s3:/a", "x") == Path("s3:/a")
    assert user_path("\udcff" + "x" * 254, "x").name == "\udcff" + "x" * 254
    monkeypatch.setattr(Path, "stat", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match=r"^--weights: 'a/b' cannot be reached"):
        reachable_path("a/b", "--weights")


def test_without_a_working_directory_absolute_paths_stay_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert working_directory() is None and absolute_path(tmp_path) == tmp_path
    with pytest.raises(UserError, match=r"^runs/train: the working directory was deleted"):
        absolute_path(Path("runs/train"))


def test_only_plain_files_and_links_to_them_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "plain").symlink_to("file")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        kinds = {"fifo": "a FIFO", "link": "a FIFO", "s": "a socket", "/dev/null": "a device", ".": "a folder"}
        for name, kind in kinds.items():
            assert special_file_kind(tmp_path / name) == kind
            with pytest.raises(OSError, match=f"it is {kind}, expected a plain file"):
                open_plain(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "nothing")
    with open_plain(tmp_path / "plain") as file:
        assert file.read() == b"content"
    assert [special_file_kind(tmp_path / name) for name in ("nothing", "file", "plain")] == [""] * 3


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
