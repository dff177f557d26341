"""Parsing of `--source`: files, folders, globs, lists, URLs, cameras and standard input."""

# Paths are strings here: a hundred thousand Path objects would cost seconds at each start.
# ruff: noqa: PTH110, PTH111, PTH112, PTH118, PTH119, PTH120, PTH207
from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal
from urllib.parse import unquote, urlsplit

from tessera.data.source.dataset_root import list_base_dir, read_path_list
from tessera.data.source.image_header import KIND_BYTES
from tessera.deploy.foreign.download import redacted
from tessera.utils.bit_depth import IMAGE_SUFFIXES, UNREAD_SUFFIXES, unread_images
from tessera.utils.errors import UserError, did_you_mean
from tessera.utils.files import check_path, files_below, is_address, open_plain, special_file_kind, suffix_of, user_path
from tessera.utils.text import one_line, shown

VIDEO_SUFFIXES = frozenset(
    {
        *(".3gp", ".asf", ".avi", ".flv", ".gif", ".m2ts", ".m4v", ".mjpeg", ".mjpg", ".mkv", ".mov", ".mp4", ".mpeg"),
        *(".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv"),
    }
)
LIST_SUFFIXES = frozenset({".txt", ".streams"})
_STREAM_SCHEMES = frozenset({"rtsp", "rtsps", "rtmp", "rtmps", "rtp", "srt", "tcp", "udp"})
IMAGE_SOURCE_SUFFIXES = IMAGE_SUFFIXES - VIDEO_SUFFIXES  # a GIF is a video here, but an image in a dataset
_KNOWN = IMAGE_SUFFIXES | VIDEO_SUFFIXES
_LOOKED_FOR = _KNOWN | UNREAD_SUFFIXES
_CAMERA = re.compile(r"(?:/dev/video)?([0-9]{1,4})")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_IMAGE = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|BM.{4}\0\0\0\0|RIFF.{4}WEBP|II[*+]\0|MM\0[*+]|P[1-7fF]\s|"
    rb"\0\0\0\x0cjP  \r\n|.{4}ftyp(?:avif|avis|heic|heix|mif1)",
    re.DOTALL,
)
_VIDEO = re.compile(
    rb".{4}ftyp|.{4}moov|.{4}mdat|RIFF.{4}AVI |\x1aE\xdf\xa3|\0\0\x01[\xb3\xba]|FLV\x01|OggS|GIF8[79]a|"
    rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11",
    re.DOTALL,
)
_LIKE = 1000  # most names that a misspelled one is compared with

log = logging.getLogger(__name__)

Form = Literal["image", "video", "stream", "camera", "address", "stdin", "unreadable"]


@dataclass(frozen=True)
class Origin:
    """One source."""

    form: Form  # "address" is a http(s) URL, whose response tells its type; "unreadable" an invalid line of a list
    where: str  # path, URL, camera number, or "-"
    name: str = ""  # relative output path, as in Frame; "" = the file name
    why: str = ""  # message of an unreadable one
    found_in: str = ""  # of a file in a given folder or glob, that folder

    @property
    def source(self) -> str:
        """Name in messages and results."""
        return redacted(self.where) if is_address(self.where) else self.where

    @property
    def is_file(self) -> bool:
        return self.form in ("image", "video")

    @property
    def place(self) -> PurePath:
        """Relative output path."""
        where = _name_of_address(self.where) if is_address(self.where) else os.path.basename(self.where)
        return PurePath(self.name or {"stdin": "stdin", "camera": f"camera{self.where}"}.get(self.form, where))


def parse_sources(specs: Iterable[str | int | Path]) -> list[Origin]:
    """Parse the values of `--source` in order; files of a folder or glob are sorted.

    A value is an image or video, folder, glob, list (.txt, .streams) of files and URLs, URL, camera number, or "-" for
    standard input. A UserError where it does not exist, is empty, or has an unknown type.
    """
    origins: list[Origin] = []
    for spec in specs:
        text = str(spec)
        origins += _of_text(text) or _of_path(text)
    if sum(origin.form == "stdin" for origin in origins) > 1:
        raise UserError("--source: found - more than once, expected it once: standard input is read once.")
    return origins


def parse_line(line: str, base: str = "") -> Origin:
    """Parse a line of a list or of standard input; paths are relative to `base`, "" = the working directory."""
    if line == "-":
        return Origin("unreadable", line, why="-: standard input cannot be a line of a list.")
    try:
        check_path(line, "--source")
        known = _of_text(line)
    except UserError as error:
        return Origin("unreadable", line, why=str(error).removeprefix("--source "))
    if known:
        return known[0]
    path = os.path.expanduser(line)
    path = os.path.normpath(os.path.join(base, path)) if base else path
    if os.path.isdir(path):
        why = f"{one_line(line, 200)}: found a folder, expected a file. Give the folder itself to --source."
        return Origin("unreadable", path, why=why)
    unread = f"{unread_images([path])}." if suffix_of(path) in UNREAD_SUFFIXES and os.path.exists(path) else ""
    why = f"{one_line(path, 200)}: {unread or 'no such file, or neither an image nor a video.'}"
    return _of_file(path) or Origin("unreadable", path, why=why)


def _of_text(text: str) -> list[Origin]:
    if text == "-":
        return [Origin("stdin", text)]
    if camera := _CAMERA.fullmatch(text):
        return [Origin("camera", camera[1])]
    if is_address(text):
        scheme = text.partition("://")[0].lower()
        if scheme in ("http", "https"):
            return [Origin("address", text)]
        if scheme in _STREAM_SCHEMES:
            return [Origin("stream", text)]
        raise UserError(
            f"--source {redacted(text)}: found a URL that starts with {scheme}://, "
            f"expected http, https, {', '.join(sorted(_STREAM_SCHEMES))}, or the path of a file."
        )
    return []


def _of_path(text: str) -> list[Origin]:
    if not text:
        raise UserError("--source: found an empty text, expected a path, a URL, a camera number or -.")
    path = str(user_path(text, "--source"))
    if os.path.isdir(path):
        files = _read_alone(
            sorted(files_below(path, _LOOKED_FOR)), shown(Path(path)), "found neither images nor videos in the folder"
        )
        return _named(files, path)
    if os.path.lexists(path):
        if suffix_of(path) in LIST_SUFFIXES:
            return _of_list(path)
        found = _of_file(path)
        if found is None:
            raise UserError(_not_known(path))
        return [found]
    if glob.has_magic(path):
        return _of_glob(text, path)
    raise UserError(f"--source {shown(Path(text))}: {_missing(path)}")


def is_image(head: bytes) -> bool:
    """Return whether the first bytes are of an image format that OpenCV may decode."""
    return _IMAGE.match(head) is not None


def is_video(head: bytes) -> bool:
    """Return whether the first bytes are of a video: MP4, AVI, Matroska, MPEG, Flash, Ogg, GIF, ASF."""
    return _VIDEO.match(head) is not None


def _of_file(path: str) -> Origin | None:
    """Return the source of a file by its suffix, or else by its first bytes; None = no image or video."""
    suffix = suffix_of(path)
    if suffix in IMAGE_SOURCE_SUFFIXES:
        return Origin("image", path)
    if suffix in VIDEO_SUFFIXES:
        return Origin("video", path)
    try:
        with open_plain(path) as file:
            head = file.read(KIND_BYTES)
    except OSError:
        return None
    if is_image(head):
        return Origin("image", path)
    return Origin("video", path) if is_video(head) else None


def _of_glob(text: str, path: str) -> list[Origin]:
    files: list[str] = []
    for match in sorted(glob.glob(path, recursive=True)):
        if suffix_of(match) in _LOOKED_FOR:
            files.append(match)
        elif os.path.isdir(match) and "**" not in path:  # ** matches the files in it too
            files += sorted(files_below(match, _LOOKED_FOR))
    files = _read_alone(files, shown(text), "no image or video matches")
    return _named(files, os.path.commonpath([os.path.dirname(file) for file in files]))


def _read_alone(files: Sequence[str], spec: str, nothing: str) -> list[str]:
    """Return the supported files and warn of the others."""
    known = [file for file in files if suffix_of(file) in _KNOWN]
    others = unread_images([file for file in files if suffix_of(file) not in _KNOWN])
    if not known:
        raise UserError(f"--source {spec}: {nothing}. {f'{others}. ' if others else ''}{_endings()}")
    if others:
        log.warning(f"--source {spec}: {others}.")
    return known


def _named(files: Sequence[str], base: str) -> list[Origin]:
    base = base or "."
    forms: Iterable[Form] = ("image" if suffix_of(file) in IMAGE_SOURCE_SUFFIXES else "video" for file in files)
    return [
        Origin(form, file, os.path.relpath(file, base), found_in=base) for form, file in zip(forms, files, strict=True)
    ]


def _of_list(path: str) -> list[Origin]:
    lines = [line for line in read_path_list(path) if not line.startswith("#")]
    if not lines:
        raise UserError(f"--source {shown(Path(path))}: the list is empty, expected a source per line.")
    folder = os.path.dirname(path) or "."
    base = list_base_dir((line for line in lines if line != "-" and not _CAMERA.fullmatch(line)), (folder, "."))
    return [
        parse_line(line if is_address(line) else line.replace("\\", "/"), folder if line.startswith("./") else base)
        for line in lines
    ]


def _missing(path: str) -> str:
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        return f"no such file, and its folder {shown(Path(folder))} does not exist either."
    try:
        with os.scandir(folder or ".") as entries:
            names = [entry.name for entry, _ in zip(entries, range(_LIKE), strict=False)]
    except OSError:
        names = []
    return f"no such file or folder.{did_you_mean(name, names)}"


def _not_known(path: str) -> str:
    what = special_file_kind(Path(path))
    if what or not os.path.exists(path):
        return f"--source {shown(Path(path))}: found {what or 'a broken link'}, expected a file or folder."
    if suffix_of(path) in UNREAD_SUFFIXES:
        return f"--source {shown(Path(path))}: {unread_images([path])}."
    return f"--source {shown(Path(path))}: neither an image nor a video nor a list of them. {_endings()}"


def _endings() -> str:
    images, videos = (" ".join(sorted(s[1:] for s in suffixes)) for suffixes in (IMAGE_SOURCE_SUFFIXES, VIDEO_SUFFIXES))
    return f"Expected files that end in {images}; {videos}."


def _name_of_address(address: str) -> str:
    try:
        parts = urlsplit(address)
        host, path = parts.netloc.rpartition("@")[2], unquote(parts.path)
    except ValueError:
        host, path = "address", ""
    last = path.rstrip("/").rpartition("/")[2]
    name = last if suffix_of(last) in _KNOWN else f"{host}_{path}".replace(".", "_")  # else a part is its suffix
    return _NOT_IN_NAMES.sub("_", name).strip("._")[:100] or "address"
