"""Dataset root directory: located, downloaded or generated; paths behind split entries and image lists.

Downloads and generated data are written only below the datasets directory (TESSERA_DATASETS), whatever a YAML says.
Elsewhere they could plant files that Python runs.
"""

# os.path treats unreadable folders as missing, where pathlib raises; Path.resolve() follows links.
# ruff: noqa: PTH110, PTH112, PTH118, PTH119, PTH122, PTH207
from __future__ import annotations

import errno
import glob
import logging
import os
import shutil
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.utils.bit_depth import IMAGE_SUFFIXES, UNREAD_SUFFIXES
from tessera.utils.environment import datasets_dir
from tessera.utils.errors import LFS_POINTER, UTF_16, ConfigError, UserError, is_lfs_pointer
from tessera.utils.extensions import extension
from tessera.utils.files import (
    absolute_path,
    files_below,
    is_address,
    locked,
    open_plain,
    suffix_of,
    user_path,
    working_directory,
)
from tessera.utils.flags.program import BASE
from tessera.utils.text import first_of, one_line, shown
from tessera.utils.types import Archive, DatasetSpec

GENERATORS = ("shapes",)
_LONGEST_LIST = 1 << 30  # bytes

logger = logging.getLogger(__name__)


def as_list(stated: object) -> list[Any]:
    """Return the entries in the value of a split."""
    return stated if isinstance(stated, list) else [stated]


def path_texts(stated: object) -> list[str]:
    """Return the paths in the value of a split, as written."""
    texts = (item.get("path") if isinstance(item, dict) else item for item in as_list(stated))
    return [text for text in texts if isinstance(text, str) and text]


@dataclass(frozen=True)
class DatasetRoot:
    """Location of a dataset as its YAML states it."""

    yaml_path: Path
    where: str  # start of messages about `path`, such as "coco.yaml:3: path"
    stated: str | None  # `path` as written; None if missing
    entries: Mapping[str, Sequence[str]]  # split → its entries as written
    archives: tuple[Archive, ...] = ()  # of `download`
    refused: str = ""  # error message about `download`; "" if it is valid or missing
    generate: str | None = None  # name of a generator

    def has_entries(self, root: Path, splits: Iterable[str] | None = None) -> bool:
        """Return whether `root` is a folder with an entry of any of `splits`; None stands for all splits."""
        texts = [text for split in splits or self.entries for text in self.entries.get(split, ())]
        return os.path.isdir(root) and any(matching_paths(root, self.resolve(root, text)) for text in texts)

    def resolve(self, root: Path, text: str) -> Path:
        """Return an entry as a path; exports may write backslashes, or ../train/images for a folder beside the YAML."""
        slashed = text.replace("\\", "/")
        forms = dict.fromkeys((text, slashed, slashed.removeprefix("../")))
        paths = [
            absolute(user_path(root / user_path(form, str(self.yaml_path)), str(self.yaml_path))) for form in forms
        ]
        return next((path for path in paths if matching_paths(root, path)), paths[0])

    def locate(self) -> Path:
        """Return the dataset's folder; download or generate it if it does not exist."""
        relative = user_path(self.stated or ".", self.where)
        here = working_directory()
        bases = (self.yaml_path.parent, here or self.yaml_path.parent, BASE, datasets_dir())
        tried = (
            [relative] if relative.is_absolute() else [*(base / relative for base in bases), _download_dir(relative)]
        )
        known = [path for path in tried if here or path.is_absolute()]
        tried = list(dict.fromkeys(absolute(user_path(path, self.where)) for path in known))
        for path in tried:
            if self.has_entries(path):
                return path
        if self.refused:
            places = "\n  ".join(map(shown, tried))
            raise ConfigError(f"{self.refused} into one of\n  {places}")
        if self.stated is not None and (self.archives or self.generate):
            return self._download_or_generate(absolute(_download_dir(relative)))
        if self.stated is None and any(Path(text).is_absolute() for texts in self.entries.values() for text in texts):
            return self.yaml_path.parent  # `build_index` names the missing entry
        places = "\n  ".join(f"{shown(path)}{'' if os.path.isdir(path) else ' (no such folder)'}" for path in tried)
        raise UserError(
            f"{self.yaml_path}: the dataset is in none of these folders (entries: {self._entries()}):\n  {places}\n"
            "Correct `path`, or set TESSERA_DATASETS to the folder that datasets are in."
        )

    def _entries(self) -> str:
        texts = dict.fromkeys(text for texts in self.entries.values() for text in texts)
        return one_line(first_of(list(texts), 10), 160)

    def _download_or_generate(self, target: Path) -> Path:
        """Create the complete dataset at `target`; concurrent processes wait for the first one."""
        done = "generated" if self.generate else "downloaded"
        datasets = absolute(datasets_dir())
        # Nothing is written through links, which may lead out of the datasets directory.
        real = Path(os.path.realpath(target))
        if Path(os.path.realpath(datasets)) not in real.parents:
            raise UserError(
                f"{self.where}: {shown(target)} does not hold the dataset, and datasets are {done} only into folders "
                f"below {shown(datasets)} (TESSERA_DATASETS). Correct `path`, or write "
                f"`path: {shown(Path(self.yaml_path.stem))}`."
            )
        staging = real.with_name(f".{real.name}.download")
        try:
            if staging.is_symlink():
                raise OSError(errno.ELOOP, f"{shown(staging)} is a link; remove it")
            # Another process may have finished by now.
            if real.exists() and any(real.iterdir()) and not self.has_entries(real):
                raise UserError(
                    f"{self.yaml_path}: {shown(target)} exists, but has none of {self._entries()}. Correct `path`, or "
                    f"move the folder away; then the dataset is {done}."
                )
            if self.generate is not None:
                logger.info("Generating the dataset %s in %s", self.generate, target)
                extension("generated shapes").write_shapes(real)
                return target
            with locked(real.with_name(f".{real.name}.lock")):
                if not self.has_entries(real):
                    self._download(staging, real)
                    shutil.rmtree(staging)
        except OSError as error:
            raise UserError(
                f"{self.yaml_path}: the dataset cannot be {done} to {shown(target)} ({error.strerror or error}). Set "
                "TESSERA_DATASETS to a writable folder with enough space."
            ) from error
        return target

    def _download(self, staging: Path, target: Path) -> None:
        """Download and unpack all archives below `staging`, then rename the result; resumes an interrupted call."""
        contents: Path = extension("downloads").fetch_archives(self.archives, staging, target)
        # An archive may hold the dataset's folder, or what belongs inside it.
        found = contents / target.name
        if not found.is_dir():
            found = contents
        needed = [split for split in ("train", "val") if split in self.entries] or list(self.entries)
        for split in needed:
            if not self.has_entries(found, [split]):
                held = first_of(sorted(path.name for path in found.iterdir()), 10) if found.is_dir() else "nothing"
                shutil.rmtree(staging)
                raise UserError(
                    f"{self.yaml_path}: the archives of `download` hold {one_line(held, 100)}, but not {split}: "
                    f"{one_line(first_of(self.entries[split], 10), 100)}. Correct `{split}` or `download`."
                )
        found.rename(target)


def _download_dir(path: Path) -> Path:
    """Return the download target of a `path`; ../datasets/coco128 means coco128 in the datasets directory."""
    if path.is_absolute():
        return path
    parts = [part for part in path.parts if part not in ("..", ".")]
    return datasets_dir() / Path(*(parts[1:] if len(parts) > 1 and parts[0] == "datasets" else parts))


def matching_paths(root: Path, entry: Path) -> list[Path]:
    """Return the entry itself if it exists, else its glob matches; the part shared with `root` is no pattern."""
    if os.path.exists(entry):
        return [entry]
    shared = os.path.commonpath((root, entry))
    pattern = os.path.relpath(entry, shared)
    if not glob.has_magic(pattern):
        return []
    found = sorted(glob.glob(os.path.join(glob.escape(shared), pattern), recursive=True))
    return [Path(match) for match in found]


def expand_entry(spec: DatasetSpec, split: str, entry: Path) -> list[Path]:
    """Return the paths of a split's entry: itself, or the folders, images and lists that its glob matches."""
    found = matching_paths(spec.root, entry)
    known = IMAGE_SUFFIXES | UNREAD_SUFFIXES | {".txt", ".json"}
    paths = [path for path in found if path == entry or os.path.isdir(path) or suffix_of(path.name) in known]
    if paths:
        return paths
    if glob.has_magic(str(entry)):
        kinds = first_of(sorted({suffix_of(path.name) or "without a suffix" for path in found}), 3)
        others = f", but for {len(found):,} files ({kinds}): name images, lists or folders" if found else ""
        raise UserError(f"{spec.yaml_path}: {split}: nothing matches {shown(entry)}{others}.")
    advice = f" The archives of `download` are not fetched again while {spec.root} exists." if spec.download else ""
    raise UserError(
        f"{spec.yaml_path}: {split}: {shown(entry)} does not exist. Relative entries start from {shown(spec.root)}; "
        f"correct `path` or `{split}`.{advice}"
    )


def absolute(path: Path) -> Path:
    """Return the path without `..`, links unresolved, as labels belong beside the path as written."""
    return Path(os.path.normpath(absolute_path(path)))


def read_path_list(file: str | Path) -> list[str]:
    """Return the lines of a list of files, stripped, without blank lines."""
    try:
        with open_plain(file) as content:
            raw = content.read(_LONGEST_LIST + 1)
    except OSError as error:
        raise UserError(f"{shown(Path(file))}: cannot be read ({error.strerror}).") from error
    if len(raw) > _LONGEST_LIST:
        raise UserError(f"{shown(Path(file))}: more than {_LONGEST_LIST:,} bytes, expected a list of files. Divide it.")
    for named, why in ((raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)), UTF_16), (is_lfs_pointer(raw), LFS_POINTER)):
        if named:
            raise UserError(f"{shown(Path(file))}: {why}.")
    text = raw.decode("utf-8-sig", errors="surrogateescape")
    return [line for row in text.splitlines() if (line := row.strip())]


def list_base_dir(lines: Iterable[str], bases: Sequence[str]) -> str:
    """Return the folder that relative lines start in: the first one in which the first such line exists."""
    first = next((line for line in lines if not line.startswith(("./", "/", "~")) and not is_address(line)), None)
    return next((base for base in bases if first and os.path.exists(os.path.join(base, first))), bases[0])


def images_and_xmls(folder: Path) -> tuple[list[str], list[str]]:
    """Return the images below `folder`, first those of unread formats, and the XML files."""
    images: dict[bool, list[str]] = {False: [], True: []}
    xmls: list[str] = []
    for path in files_below(folder, IMAGE_SUFFIXES | UNREAD_SUFFIXES | {".xml"}):
        suffix = suffix_of(path)
        (xmls if suffix == ".xml" else images[suffix in IMAGE_SUFFIXES]).append(path)
    return images[False] + images[True], sorted(xmls)


def stem_of(path: str) -> str:
    """Return the name of a file without its suffix."""
    return os.path.splitext(os.path.basename(path))[0]
