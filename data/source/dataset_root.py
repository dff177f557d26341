"""The folder of a dataset: found, or downloaded or generated below the folder of datasets (TESSERA_DATASETS).

Nothing is ever written anywhere else, whatever a YAML says: a file in a folder of Python's, say, would be run.
"""

# A folder that may not be read counts as none here; pathlib's own checks raise, and its resolve() follows links.
# ruff: noqa: PTH100, PTH110, PTH112, PTH118, PTH119, PTH122, PTH207
from __future__ import annotations

import glob
import hashlib
import logging
import os
import shutil
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from tessera.data.source.archives import unpack
from tessera.data.source.download import fetch, locked
from tessera.data.source.drawn_shapes import write_shapes
from tessera.utils.bit_depth import IMAGE_SUFFIXES, UNREAD_SUFFIXES
from tessera.utils.environment import datasets_dir
from tessera.utils.errors import LFS_POINTER, UTF_16, ConfigError, UserError, is_lfs_pointer
from tessera.utils.files import files_below, is_address, open_plain, suffix_of, user_path
from tessera.utils.flags.program import BASE
from tessera.utils.text import first_of, one_line, shown
from tessera.utils.types import Archive, DatasetSpec

GENERATORS = {"shapes": write_shapes}
_LONGEST_LIST = 1 << 30  # bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetRoot:
    """What a dataset YAML says of its folder."""

    yaml_path: Path  # the YAML
    where: str  # what messages about `path` start with, such as "coco.yaml:3: path"
    stated: str | None  # `path` as written; None where it is missing
    entries: Mapping[str, Sequence[str]]  # split → its entries as written
    archives: tuple[Archive, ...] = ()  # of `download`
    refused: str = ""  # why `download` cannot be followed; "" where it can, or there is none
    generate: str | None = None  # name of a generator

    def has_entries(self, root: Path, splits: Iterable[str] | None = None) -> bool:
        """Whether `root` is a folder with an entry of any of `splits` (all where None)."""
        texts = [text for split in splits or self.entries for text in self.entries.get(split, ())]
        return os.path.isdir(root) and any(matching_paths(root, self.resolve(root, text)) for text in texts)

    def resolve(self, root: Path, text: str) -> Path:
        """An entry as a path; some exports write ../train/images for a folder beside the YAML, or backslashes."""
        slashed = text.replace("\\", "/")
        forms = dict.fromkeys((text, slashed, slashed.removeprefix("../")))
        paths = [
            absolute(user_path(root / user_path(form, str(self.yaml_path)), str(self.yaml_path))) for form in forms
        ]
        return next((path for path in paths if matching_paths(root, path)), paths[0])

    def locate(self) -> Path:
        """The dataset's folder; where there is none, it is downloaded or generated."""
        relative = user_path(self.stated or ".", self.where)
        bases = (self.yaml_path.parent, Path.cwd(), BASE, datasets_dir())
        tried = (
            [relative] if relative.is_absolute() else [*(base / relative for base in bases), _download_dir(relative)]
        )
        tried = list(dict.fromkeys(absolute(user_path(path, self.where)) for path in tried))
        for path in tried:
            if self.has_entries(path):
                return path
        if self.refused:
            places = "\n  ".join(map(shown, tried))
            raise ConfigError(f"{self.refused} into one of\n  {places}")
        if self.stated is not None and (self.archives or self.generate):
            return self._download_or_generate(absolute(_download_dir(relative)))
        if self.stated is None and any(Path(text).is_absolute() for texts in self.entries.values() for text in texts):
            return self.yaml_path.parent  # `path` is not at fault: `build_index` names the missing entry
        places = "\n  ".join(f"{shown(path)}{'' if os.path.isdir(path) else ' (no such folder)'}" for path in tried)
        raise UserError(
            f"{self.yaml_path}: the dataset is in none of these folders (entries: {self._entries()}):\n  {places}\n"
            "Correct `path`, or set TESSERA_DATASETS to the folder that datasets are in."
        )

    def _entries(self) -> str:
        texts = dict.fromkeys(text for texts in self.entries.values() for text in texts)
        return one_line(first_of(list(texts), 10), 160)

    def _download_or_generate(self, target: Path) -> Path:
        """Generate or download the dataset so that `target` appears whole; one process does, the others wait for it."""
        done = "generated" if self.generate else "downloaded"
        datasets = absolute(datasets_dir())
        # Links may lead into the folder of datasets and out of it: none is written through.
        real = Path(os.path.realpath(target))
        if Path(os.path.realpath(datasets)) not in real.parents:
            raise UserError(
                f"{self.where}: {shown(target)} does not hold the dataset, and datasets are {done} only into folders "
                f"below {shown(datasets)} (TESSERA_DATASETS). Write `path: {shown(Path(self.yaml_path.stem))}` to have "
                f"it {done} there, or correct `path`."
            )
        staging = real.with_name(f".{real.name}.download")
        try:
            if (
                real.exists() and any(real.iterdir()) and not self.has_entries(real)
            ):  # another process may be done by now
                raise UserError(
                    f"{self.yaml_path}: {shown(target)} exists, but has none of {self._entries()}. Move it away to "
                    f"have the dataset {done} there, or correct `path`."
                )
            if self.generate is not None:
                logger.info("Generating the dataset %s in %s", self.generate, target)
                GENERATORS[self.generate](real)
                return target
            with locked(real.with_name(f".{real.name}.lock")):  # beside what its holder may remove
                if not self.has_entries(real):
                    self._download(staging, real)
                    shutil.rmtree(staging)
        except OSError as error:
            raise UserError(
                f"{self.yaml_path}: the dataset cannot be {done} to {shown(target)} ({error.strerror or error}). Set "
                "TESSERA_DATASETS to a folder that can be written and has room."
            ) from error
        return target

    def _download(self, staging: Path, target: Path) -> None:
        """Fetch and unpack every archive below `staging`, then rename the result. Resumes an interrupted call."""
        contents = staging / "contents"
        for archive in self.archives:
            name = PurePosixPath(urlsplit(archive.url).path).name or "archive"
            key = hashlib.blake2b("\0".join(archive).encode(), digest_size=4).hexdigest()
            done = staging / f"{key}.done"
            if not done.exists():
                logger.info("Downloading %s for %s", archive.url, target)
                file = fetch(archive.url, staging / f"{key}-{name}")
                unpack(file, contents / archive.into)
                done.touch()
                file.unlink()
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
    """Where a dataset of this `path` is downloaded to; ../datasets/coco128, as other trainers write, is in ours."""
    if path.is_absolute():
        return path
    parts = [part for part in path.parts if part not in ("..", ".")]
    return datasets_dir() / Path(*(parts[1:] if len(parts) > 1 and parts[0] == "datasets" else parts))


def matching_paths(root: Path, entry: Path) -> list[Path]:
    """The entry itself where it exists, else what it matches as a glob; what it shares with `root` is no pattern."""
    if os.path.exists(entry):
        return [entry]
    shared = os.path.commonpath((root, entry))
    pattern = os.path.relpath(entry, shared)
    if not glob.has_magic(pattern):
        return []
    found = sorted(glob.glob(os.path.join(glob.escape(shared), pattern), recursive=True))
    return [Path(match) for match in found]


def expand_entry(spec: DatasetSpec, split: str, entry: Path) -> list[Path]:
    """What an entry of a split leads to: itself, or the folders, images and lists that it matches as a glob."""
    found = matching_paths(spec.root, entry)
    known = IMAGE_SUFFIXES | UNREAD_SUFFIXES | {".txt", ".json"}
    paths = [path for path in found if path == entry or os.path.isdir(path) or suffix_of(path.name) in known]
    if paths:
        return paths
    if glob.has_magic(str(entry)):
        raise UserError(f"{spec.yaml_path}: {split}: nothing matches {shown(entry)}.")
    advice = f" The archives of `download` are not fetched again while {spec.root} exists." if spec.download else ""
    raise UserError(
        f"{spec.yaml_path}: {split}: {shown(entry)} does not exist. Relative entries start from {shown(spec.root)}; "
        f"correct `path` or `{split}`.{advice}"
    )


def absolute(path: Path) -> Path:
    """Without `..`, links kept: labels are looked for beside the path as written."""
    return Path(os.path.abspath(path))


def read_list(file: str | Path) -> list[str]:
    """The lines of a list of files, stripped, without blank ones."""
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


def base_of_list(lines: Iterable[str], bases: Sequence[str]) -> str:
    """Where relative lines without `./` start: the first of the folders in which the first of them exists."""
    first = next((line for line in lines if not line.startswith(("./", "/", "~")) and not is_address(line)), None)
    return next((base for base in bases if first and os.path.exists(os.path.join(base, first))), bases[0])


def images_and_xmls(folder: Path) -> tuple[list[str], list[str]]:
    """Images below `folder`, first those whose suffix is not read, and XML files."""
    images: dict[bool, list[str]] = {False: [], True: []}
    xmls: list[str] = []
    for path in files_below(folder, IMAGE_SUFFIXES | UNREAD_SUFFIXES | {".xml"}):
        suffix = suffix_of(path)
        (xmls if suffix == ".xml" else images[suffix in IMAGE_SUFFIXES]).append(path)
    return images[False] + images[True], sorted(xmls)


def stem_of(path: str) -> str:
    """The name of a file without its suffix."""
    return os.path.splitext(os.path.basename(path))[0]
