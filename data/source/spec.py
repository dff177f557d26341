"""A dataset YAML becomes a DatasetSpec: read, checked, its folder found, downloaded or generated.

A relative `path` names the first of these folders that holds an image entry of the YAML: below the YAML's own folder,
the working directory, the repository, the folder of datasets (TESSERA_DATASETS). Nothing in a YAML is ever run.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from data.source.archives import unpack
from data.source.download import fetch, locked
from data.source.shapes import write_shapes
from utils.environment import REPO, datasets_dir
from utils.errors import ConfigError, UserError, did_you_mean
from utils.types import Archive, DatasetSpec
from utils.yaml_file import Row, YamlMapping, read_yaml

SPLITS = ("train", "val", "test")
_KEYS = (*SPLITS, "path", "names", "nc", "download", "generate")
_GENERATORS = {"shapes": write_shapes}
_FOLDER = REPO / "data"

logger = logging.getLogger(__name__)


def load_spec(data: str | Path) -> DatasetSpec:
    """Read a dataset YAML and make sure that its folder is there.

    Args:
        data: the YAML, as given or from the repository's data/, with or without ".yaml".

    Returns:
        The specification; all entries are absolute. An entry may still be missing: `build_index` raises when it is
        used.

    Raises:
        UserError: no such YAML, a mistake in it, or the dataset is nowhere and unavailable.
    """
    yaml_path = _find_yaml(data)
    found = read_yaml(yaml_path, "keys such as train, val and names")
    _refuse_misspelled(found)
    names = _names(found)
    entries = _entries(found)
    archives = _archives(found)
    generate = found.values.get("generate")
    if generate is not None and generate not in _GENERATORS:
        raise ConfigError(f"{found.at('generate')}: generate: found '{generate}', expected {' or '.join(_GENERATORS)}.")
    plan = _Plan(yaml_path, entries, archives, generate)
    stated = found.values.get("path")
    if stated is not None and not isinstance(stated, str):
        raise ConfigError(f"{found.at('path')}: path: found {stated!r}, expected a folder.")
    root = _find_root(plan, stated)
    splits = {split: tuple(_resolve(root, text) for text in texts) for split, texts in entries.items()}
    return DatasetSpec(yaml_path.stem, yaml_path, root, splits, names, archives)


def _find_yaml(data: str | Path) -> Path:
    given = Path(data).expanduser()
    suffixed = [given] if given.suffix in (".yaml", ".yml") else [given, given.with_name(given.name + ".yaml")]
    tried = [*suffixed, *(_FOLDER / path for path in suffixed if not path.is_absolute())]
    for path in tried:
        if path.is_file():
            return _absolute(path)
    known = sorted(path.name for path in _FOLDER.glob("*.yaml"))
    hint = did_you_mean(given.name, [*known, *(Path(name).stem for name in known)])
    places = "\n  ".join(map(str, tried))
    raise ConfigError(
        f"--data {data}: no such dataset YAML.{hint} Tried\n  {places}\nThe repository has {', '.join(known)}."
    )


def _refuse_misspelled(found: YamlMapping) -> None:
    """Other tools keep keys of their own in these files: only what looks like a typo of ours is refused."""
    for key in found.values:
        if isinstance(key, str) and key not in _KEYS:
            absent = [known for known in _KEYS if known not in found.values and _is_typo(key, known)]
            if absent:
                raise ConfigError(f"{found.at(key)}: unknown key '{key}'.{did_you_mean(key, absent)}")


def _is_typo(key: str, known: str) -> bool:
    """Whether `key` looks like a misspelling of `known`: two letters swapped, or one added, left out or replaced."""
    if key.lower() == known:
        return True
    if abs(len(key) - len(known)) > 1 or min(len(key), len(known)) < 3:
        return False
    if sorted(key) == sorted(known):
        return True
    start = next((i for i, (a, b) in enumerate(zip(key, known, strict=False)) if a != b), min(len(key), len(known)))
    rest, other = key[start:], known[start:]
    return rest[1:] == other or rest == other[1:] or rest[1:] == other[1:]


def _names(found: YamlMapping) -> tuple[str, ...]:
    names = found.values.get("names")
    expected = "a list, or a map from 0, 1, 2 … to names"
    where = found.at("names")
    if not names or not isinstance(names, (list, dict)):
        raise ConfigError(f"{where}: names: found {names!r}, expected {expected}. Name the classes of the labels.")
    rows: list[Row] = list(range(len(names)))  # class → its row in the file
    if isinstance(names, dict):
        keys = [int(key) if isinstance(key, str) and key.isdecimal() else key for key in names]
        if any(type(key) is not int for key in keys) or sorted(keys) != list(range(len(keys))):
            odd = [key for key in keys if type(key) is not int] or sorted(set(keys) - set(range(len(keys)))) or keys
            raise ConfigError(f"{where}: names: found the key {odd[0]!r}, expected {expected} without gaps.")
        pairs = sorted(zip(keys, names.items(), strict=True), key=lambda pair: pair[0])
        rows = [str(key) for _, (key, _) in pairs]
        names = [name for _, (_, name) in pairs]
    for number, name in enumerate(names):
        if isinstance(name, bool) or not isinstance(name, (str, int, float)) or name == "":
            raise ConfigError(
                f"{found.at('names', rows[number])}: names: class {number} is {name!r}, expected a name. "
                "Put it in quotes."
            )
    names = tuple(map(str, names))
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        numbers = [number for number, name in enumerate(names) if name == twice]
        raise ConfigError(
            f"{found.at('names', rows[numbers[1]])}: names: '{twice}' is the name of classes "
            f"{' and '.join(map(str, numbers))}. Give each its own."
        )
    nc = found.values.get("nc")
    if nc is not None and (type(nc) is not int or nc != len(names)):
        raise ConfigError(
            f"{found.at('nc')}: nc is {nc!r}, but names has {len(names)} classes. Make them agree, or leave nc out."
        )
    return names


def _entries(found: YamlMapping) -> dict[str, tuple[str, ...]]:
    """Split → its entries as written; an empty entry counts as a missing one."""
    entries: dict[str, tuple[str, ...]] = {}
    for split in SPLITS:
        stated = found.values.get(split)
        if stated is None or stated in ("", []):
            continue
        texts = stated if isinstance(stated, list) else [stated]
        if not all(isinstance(text, str) and text for text in texts):
            raise ConfigError(
                f"{found.at(split)}: {split}: found {stated!r}, expected a folder, a list of images (.txt), a glob, "
                "a COCO file (.json), or a list of those."
            )
        entries[split] = tuple(texts)
    if not entries:
        raise ConfigError(f"{found.name}: found none of train, val and test, expected at least one with images.")
    return entries


def _archives(found: YamlMapping) -> tuple[Archive, ...]:
    """The archives of `download`. Anything but addresses is refused: Tessera never runs what a dataset brings."""
    stated = found.values.get("download")
    if stated is None or stated == "":
        return ()
    where = found.at("download")
    archives: list[Archive] = []
    for item in stated if isinstance(stated, list) else [stated]:
        known = isinstance(item, dict) and "url" in item and set(item) <= {"url", "into"}
        url, into = (item["url"], item.get("into", "")) if known else (item, "")
        text = url.strip() if isinstance(url, str) else ""
        if not text.startswith(("http://", "https://")) or len(text.split()) != 1:
            shown = str(item).strip().splitlines()[0] if str(item).strip() else "nothing"
            raise ConfigError(
                f"{where}: download: found '{shown[:60]}', expected the address of an archive (https://….zip or "
                ".tar.gz) or several, each optionally with `into`. Scripts are refused, never run: fetch the dataset "
                "by hand and remove `download`."
            )
        if not isinstance(into, str) or PurePosixPath(into).is_absolute() or ".." in PurePosixPath(into).parts:
            raise ConfigError(
                f"{where}: download: into: found {into!r}, expected a folder below the folder of datasets."
            )
        archives.append(Archive(text, into))
    return tuple(archives)


@dataclass(frozen=True)
class _Plan:
    """What it takes to find a dataset, or to obtain it."""

    yaml_path: Path
    entries: Mapping[str, Sequence[str]]
    archives: tuple[Archive, ...]
    generate: str | None

    def is_in(self, root: Path, splits: Iterable[str] = SPLITS) -> bool:
        """Whether `root` is a folder with an entry of any of `splits`."""
        texts = [text for split in splits for text in self.entries.get(split, ())]
        return root.is_dir() and any(_exists(_resolve(root, text)) for text in texts)


def _find_root(plan: _Plan, stated: str | None) -> Path:
    """The dataset's folder; where there is none, it is downloaded or generated."""
    relative = Path(stated or ".").expanduser()
    if relative.is_absolute():
        target, tried = relative, [relative]
    else:
        target = datasets_dir() / _below(relative)
        bases = (plan.yaml_path.parent, Path.cwd(), REPO, datasets_dir())
        tried = [*(base / relative for base in bases), target]
    tried = list(dict.fromkeys(_absolute(path) for path in tried))
    for path in tried:
        if plan.is_in(path):
            return path
    if stated is not None and (plan.archives or plan.generate):
        _obtain(plan, _absolute(target))
        return _absolute(target)
    if stated is None and any(Path(text).is_absolute() for texts in plan.entries.values() for text in texts):
        return plan.yaml_path.parent  # `path` is not at fault: `build_index` names the missing entry
    entries = ", ".join(dict.fromkeys(text for texts in plan.entries.values() for text in texts))
    places = "\n  ".join(f"{path}{'' if path.is_dir() else ' (no such folder)'}" for path in tried)
    raise UserError(
        f"{plan.yaml_path}: the dataset is in none of these folders (entries: {entries}):\n  {places}\n"
        "Correct `path`, or set TESSERA_DATASETS to the folder that datasets are in."
    )


def _below(relative: Path) -> Path:
    """A path such as ../datasets/coco128, which other trainers write for their folder of datasets, inside ours."""
    parts = [part for part in relative.parts if part not in ("..", ".")]
    return Path(*(parts[1:] if len(parts) > 1 and parts[0] == "datasets" else parts))


def _resolve(root: Path, text: str) -> Path:
    """An entry as a path. Some exports write ../train/images for a folder beside the YAML; they are understood."""
    path = _absolute(root / Path(text).expanduser())
    if text.startswith("../") and not _exists(path):
        inside = _absolute(root / text.removeprefix("../"))
        if _exists(inside):
            return inside
    return path


def _exists(path: Path) -> bool:
    if path.exists() or not glob.has_magic(str(path)):
        return path.exists()
    return next(glob.iglob(str(path), recursive=True), None) is not None  # noqa: PTH207 - the pattern is absolute


def _absolute(path: Path) -> Path:
    """Without `..`, links kept: labels are looked for beside the path as written."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links


def _obtain(plan: _Plan, target: Path) -> None:
    """Generate or download the dataset so that `target` appears whole; one process does, the others wait for it."""
    if target.exists() and any(target.iterdir()):
        entries = ", ".join(dict.fromkeys(text for texts in plan.entries.values() for text in texts))
        raise UserError(
            f"{plan.yaml_path}: {target} exists, but has none of {entries}. Move it away to have the dataset "
            f"{'generated' if plan.generate else 'downloaded'} there, or correct `path`."
        )
    if plan.generate is not None:
        logger.info("Generating the dataset %s in %s", plan.generate, target)
        _GENERATORS[plan.generate](target)
        return
    staging = target.with_name(f".{target.name}.download")
    try:
        with locked(staging / "lock"):
            if not plan.is_in(target):
                _download(plan, staging, target)
                shutil.rmtree(staging)
    except OSError as error:
        raise UserError(
            f"{plan.yaml_path}: cannot download the dataset to {target} ({error.strerror or error}). Set "
            "TESSERA_DATASETS to a folder that can be written and has room."
        ) from error


def _download(plan: _Plan, staging: Path, target: Path) -> None:
    """Fetch and unpack every archive below `staging`, then rename the result. Resumes a call that was interrupted."""
    contents = staging / "contents"
    for archive in plan.archives:
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
    needed = [split for split in ("train", "val") if split in plan.entries] or list(plan.entries)
    for split in needed:
        if not plan.is_in(found, [split]):
            held = ", ".join(sorted(path.name for path in found.iterdir())) if found.is_dir() else "nothing"
            shutil.rmtree(staging)
            raise UserError(
                f"{plan.yaml_path}: the archives of `download` hold {held}, but not {split}: "
                f"{', '.join(plan.entries[split])}. Correct `{split}` or `download`."
            )
    found.rename(target)
