"""The zip archive that a checkpoint is: read only where it cannot unfold beyond the file.

Members are stored, never compressed, as torch.save writes them. zipfile compares each with its checksum as it is read.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.utils.checkpoints.restricted_unpickler import Damaged, Machine, Storage
from tessera.utils.errors import UserError
from tessera.utils.text import first_line, first_of, shown

# What reading an archive raises that is damaged, or of a kind that zipfile does not read.
ARCHIVE_ERRORS = (
    *(Damaged, zipfile.BadZipFile, NotImplementedError, EOFError, UnicodeDecodeError, struct.error),
    *(OSError, OverflowError),  # from seeking to where the archive says
)
_OLD_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # how files of torch before 1.6 begin


def unreadable(path: Path, error: BaseException) -> UserError:
    """Explain what a file is that one of ARCHIVE_ERRORS kept from being read, with the remedy."""
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as refused:
        return UserError(f"{path}: cannot be read ({refused.strerror}). Fix its permissions or its disk.")
    text, found = " ".join(start.decode("utf-8", "surrogateescape").split()), first_line(error)
    if not start:
        found = "an empty file"
    elif start.startswith(b"PK"):
        if "not a zip file" in found:
            found = f"the beginning of a checkpoint, {path.stat().st_size:,} bytes without an end"
    elif start.startswith(b"\x1f\x8b"):
        found = "a gzip archive, which must be unpacked first"
    elif start.startswith(_OLD_TORCH):
        found = "the format of torch before 1.6, to be saved again with a later one"
    else:
        found = f"text: {shown(text, 40)}" if text.isprintable() else "no zip archive"
    others = sorted(other.name for other in path.parent.glob("*.pt") if other != path)
    return UserError(
        f"{path}: damaged, or not a checkpoint: found {found}. Take another"
        f"{f', such as {first_of(others, 3)} beside it,' if others else ''} or copy the file again from its source."
    )


class Archive:
    """An open archive with one pickle, whose members all lie in the file as they are."""

    def __init__(self, archive: zipfile.ZipFile, path: Path) -> None:
        self._archive, self._path = archive, path
        self._bytes_left = path.stat().st_size
        self._storages: dict[str, Tensor] = {}
        entry = self._pickle_entry()
        self._check_members()
        self._prefix = entry.removesuffix("data.pkl")
        self.pickled = archive.read(entry)

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Archive]:
        """Open a checkpoint. Nothing of its content is read yet.

        Raises:
            UserError: a member is compressed or encrypted, or it is something else than a checkpoint.
            One of ARCHIVE_ERRORS: it is damaged, or no archive.
        """
        with zipfile.ZipFile(path) as archive:
            yield cls(archive, path)

    def content(self) -> Any:
        """Return the object that the pickle describes: plain values, tensors, records and globals; nothing is run.

        Raises:
            UserError: the pickle asks for what has no place in a checkpoint.
            One of ARCHIVE_ERRORS: the file is damaged.
        """
        order = f"{self._prefix}byteorder"
        if order in self._archive.namelist() and self._archive.read(order) != b"little":
            raise Damaged("written on a big-endian machine")
        return Machine(self._load, str(self._path)).run(self.pickled)

    def outline(self) -> Any:
        """As `content`, with tensors of the meta device: no storage is read."""
        return Machine(self._empty, str(self._path)).run(self.pickled)

    def _check_members(self) -> None:
        """No member is packed, and together they are no larger than the file."""
        infos = self._archive.infolist()
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1 or info.compress_size != info.file_size:
                raise UserError(
                    f"{self._path}: refused: compressed or encrypted inside, as torch.save never does. Copy the "
                    f"original file again."
                )
        if sum(info.file_size for info in infos) > self._bytes_left:
            raise Damaged("its members are larger than the file")
        if len({info.filename for info in infos}) < len(infos):
            raise Damaged("two of its members have one name")

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
        """All elements of a storage, (numel,); it is read once, and all have no more bytes than the file."""
        if storage.key not in self._storages:
            try:
                info = self._archive.getinfo(f"{self._prefix}data/{storage.key}")
            except KeyError as error:
                raise Damaged(f"storage {shown(storage.key)} is missing") from error
            expected = storage.numel * storage.dtype.itemsize
            if info.file_size != expected:
                raise Damaged(f"storage {shown(storage.key)} has {info.file_size} bytes, expected {expected}")
            self._bytes_left -= expected
            if self._bytes_left < 0:
                raise Damaged("its storages overlap")
            content = bytearray(self._archive.read(info))
            self._storages[storage.key] = (
                torch.frombuffer(content, dtype=storage.dtype) if content else torch.empty(0, dtype=storage.dtype)
            )
        flat = self._storages[storage.key]
        if flat.dtype != storage.dtype or flat.numel() != storage.numel:
            raise Damaged(f"storage {shown(storage.key)} is described in two ways")
        return flat

    def _empty(self, storage: Storage) -> Tensor:
        """A storage of as many elements, which are nowhere."""
        if storage.numel * storage.dtype.itemsize > self._path.stat().st_size:
            raise Damaged(f"storage {shown(storage.key)} has {storage.numel} elements, more than the file")
        return torch.empty(storage.numel, dtype=storage.dtype, device="meta")
