"""Reading of .pt files, which are zip archives, without running code; tensors take at most the size of the file.

torch.save stores members uncompressed. zipfile compares each member with its checksum.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.utils.checkpoints.restricted_unpickler import DamagedFile, RestrictedUnpickler, Storage
from tessera.utils.errors import UserError
from tessera.utils.text import first_line, first_of, shown

# Errors of damaged archives, and of archives that zipfile cannot read.
ARCHIVE_ERRORS = (
    *(DamagedFile, zipfile.BadZipFile, NotImplementedError, EOFError, UnicodeDecodeError, struct.error),
    *(OSError, OverflowError),  # from seeking to a damaged offset
)
_OLD_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # first bytes of files of torch before 1.6


def unreadable(path: Path, error: BaseException) -> UserError:
    """Return the message for a file whose reading raised one of ARCHIVE_ERRORS."""
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as refused:
        return UserError(f"{path}: cannot be read ({refused.strerror}). Check its permissions and the disk.")
    text, found = " ".join(start.decode("utf-8", "surrogateescape").split()), first_line(error)
    if not start:
        found = "an empty file"
    elif start.startswith(b"PK"):
        if "not a zip file" in found:
            found = f"a truncated checkpoint of {path.stat().st_size:,} bytes"
    elif start.startswith(_OLD_TORCH):
        found = "the format of torch before 1.6, to be saved again with a later version"
    else:
        found = f"text: {shown(text, 40)}" if text.isprintable() else "no zip archive"
    others = sorted(other.name for other in path.parent.glob("*.pt") if other != path)
    beside = f", such as {first_of(others, 3)} in the same directory," if others else ""
    return UserError(
        f"{path}: damaged, or not a checkpoint: found {found}. Use another checkpoint{beside} or copy the file again."
    )


def read_archive(path: Path) -> tuple[Any, int]:
    """Return the object in a checkpoint file, and the length of its pickle in bytes.

    The object consists of plain values, tensors, inert objects and globals. No code runs.

    Raises:
        UserError: a compressed member, something else than a checkpoint, or a pickle that names what none needs.
        One of ARCHIVE_ERRORS: the file is damaged, or no archive.
    """
    with zipfile.ZipFile(path) as archive:
        return _Archive(archive, path).read()


class _Archive:
    """Open archive with one pickle and the storages of its tensors."""

    def __init__(self, archive: zipfile.ZipFile, path: Path) -> None:
        self._archive, self._path = archive, path
        self._bytes_left = path.stat().st_size
        self._storages: dict[str, Tensor] = {}
        entry = self._pickle_entry()
        self._prefix = entry.removesuffix("data.pkl")
        self._check_members()

    def read(self) -> tuple[Any, int]:
        order = f"{self._prefix}byteorder"
        if order in self._archive.namelist() and self._archive.read(order) != b"little":
            raise DamagedFile("written on a big-endian machine")
        pickled = self._archive.read(f"{self._prefix}data.pkl")
        return RestrictedUnpickler(self._load, str(self._path)).run(pickled), len(pickled)

    def _check_members(self) -> None:
        """Refuse compressed members, and members that are together larger than the file."""
        infos = self._archive.infolist()
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1 or info.compress_size != info.file_size:
                raise UserError(
                    f"{self._path}: refused: compressed or encrypted members, which torch.save never writes. Copy the "
                    "original file again."
                )
        if sum(info.file_size for info in infos) > self._bytes_left:
            raise DamagedFile("its members are larger than the file")
        if len({info.filename for info in infos}) < len(infos):
            raise DamagedFile("two of its members have the same name")

    def _pickle_entry(self) -> str:
        names = self._archive.namelist()
        if any(name.endswith("/constants.pkl") for name in names):
            raise UserError(f"{self._path}: a TorchScript export, which cannot be trained. Expected a checkpoint.")
        pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise UserError(
                f"{self._path}: not a checkpoint: expected one data.pkl in the archive, found {len(pickles)}."
            )
        return pickles[0]

    def _load(self, storage: Storage) -> Tensor:
        """Return all elements of a storage, (numel,). All storages together have no more bytes than the file."""
        if storage.key not in self._storages:
            try:
                info = self._archive.getinfo(f"{self._prefix}data/{storage.key}")
            except KeyError as error:
                raise DamagedFile(f"storage {shown(storage.key)} is missing") from error
            expected = storage.numel * storage.dtype.itemsize
            if info.file_size != expected:
                raise DamagedFile(f"storage {shown(storage.key)} has {info.file_size} bytes, expected {expected}")
            self._bytes_left -= expected
            if self._bytes_left < 0:
                raise DamagedFile("its storages overlap")
            content = bytearray(self._archive.read(info))
            self._storages[storage.key] = (
                torch.frombuffer(content, dtype=storage.dtype) if content else torch.empty(0, dtype=storage.dtype)
            )
        flat = self._storages[storage.key]
        if flat.dtype != storage.dtype or flat.numel() != storage.numel:
            raise DamagedFile(f"storage {shown(storage.key)} is described in two ways")
        return flat
