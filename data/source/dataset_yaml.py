"""Dataset YAML parsing: from the file to a DatasetSpec.

A relative `path` is looked up beside the YAML, in the working directory, in the clone and in the datasets directory
(TESSERA_DATASETS); the first folder that holds an entry wins. Nothing in a YAML is executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from tessera.data.labels.classes import Classes, parse_classes, parse_coco_classes
from tessera.data.labels.coco import read_category_names
from tessera.data.source.dataset_root import GENERATORS, DatasetRoot, absolute, as_list, expand_entry, path_texts
from tessera.data.source.split_files import stats
from tessera.utils.bit_depth import PixelRule
from tessera.utils.environment import cache_dir
from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.files import cached_content, is_address, special_file_kind, user_path
from tessera.utils.flags.program import HOME
from tessera.utils.seeding import ValFraction
from tessera.utils.text import first_of, shown
from tessera.utils.types import Archive, DatasetSpec
from tessera.utils.yaml_file import YamlMapping, read_yaml

SPLITS = ("train", "val", "test")
_KEYS = (
    *(*SPLITS, "path", "names", "nc", "ignore", "classes", "download", "generate", "pixels", "split_seed", "kpt_shape"),
    "label_weights",
)
_OTHER_WORD = re.compile("(train|val|test)(id|idation|ing|set)")  # for a split
_FRACTION_AS_TEXT = re.compile(r"\d*[.,]\d+|[\d.,]+\s*%")
_ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar", ".zst")
_FOLDER = HOME / "data"

logger = logging.getLogger(__name__)


def load_spec(data: str | Path, *, obtain: bool = True) -> DatasetSpec:
    """Load a dataset YAML and locate its dataset; `build_index` reports missing entries.

    `data` is its path, a name in the repository's data/, or a folder with data.yaml or one other YAML. `obtain`
    downloads or generates a missing dataset.

    Raises:
        UserError: no such YAML, a mistake in it, or the dataset is missing and unavailable.
    """
    yaml_path, found, classes = read_dataset_yaml(data)
    spec = _locate(yaml_path, found, obtain)
    classes = classes or parse_coco_classes(found, _coco_category_names(spec))
    labelled, weights = _labelled(found, spec, classes.names), found.values.get("label_weights")
    if weights not in (None, "score"):
        raise ConfigError(
            f"{found.at('label_weights')}: label_weights: found {shown(weights)}, expected score, so that the "
            "scores of train's labels weigh their objects. Without the key all objects count fully."
        )
    return dataclasses.replace(spec, **classes._asdict(), labelled=labelled, label_weights=weights == "score")


def _locate(yaml_path: Path, found: YamlMapping, obtain: bool) -> DatasetSpec:
    """Return the dataset of a YAML, without its classes."""
    held_out, keypoints = _val_fraction(found), _keypoints(found)
    entries, labelled = _entries(found, held_out)
    archives, refused = _archives(found)
    pixels = PixelRule.from_plain(found.values.get("pixels"), f"{found.at('pixels')}: pixels")
    generate, stated = found.values.get("generate"), found.values.get("path")
    if generate is not None and generate not in GENERATORS:
        raise ConfigError(
            f"{found.at('generate')}: generate: found {shown(generate)}, expected {' or '.join(GENERATORS)}."
        )
    if stated is not None and not isinstance(stated, str):
        raise ConfigError(f"{found.at('path')}: path: found {shown(stated)}, expected a folder.")
    where = f"{found.at('path')}: path"
    means = (archives, refused, generate) if obtain else ((), "", None)
    dataset_root = DatasetRoot(yaml_path, where, stated, entries, *means)
    root = dataset_root.locate()
    splits = {split: tuple(dataset_root.resolve(root, text) for text in texts) for split, texts in entries.items()}
    return DatasetSpec(
        yaml_path.stem, yaml_path, root, splits, (), archives, pixels, held_out, keypoints=keypoints, labelled=labelled
    )


def load_label_names(data: str | Path) -> tuple[str, ...]:
    """Return the class names by their numbers in label files; raises as `load_spec`.

    The dataset may be missing unless its COCO files hold the names; it is never downloaded.
    """
    classes = read_dataset_yaml(data)[2] or load_spec(data, obtain=False)
    return classes.label_names or classes.names


def read_dataset_yaml(data: str | Path) -> tuple[Path, YamlMapping, Classes | None]:
    """Return path and content of a dataset YAML, and its classes; None if its COCO files name them."""
    yaml_path = _find_yaml(data)
    found = read_yaml(yaml_path, "keys such as train, val and names", ("names", "ignore", "classes"))
    _refuse_misspelled(found)
    in_coco = found.values.get("names") is None and _is_coco(found)
    return yaml_path, found, None if in_coco else parse_classes(found)


def _find_yaml(data: str | Path) -> Path:
    given = user_path(data, "--data")
    suffixed = [given] if given.suffix in (".yaml", ".yml") else [given, Path(f"{given}.yaml")]
    tried = [*suffixed, *(_FOLDER / path for path in suffixed if not path.is_absolute())]
    for path in tried:
        if os.path.isfile(path):  # noqa: PTH113 - Path.is_file() raises if a folder is not readable
            if path.suffix.lower() in (".json", ".txt", ".data"):
                raise ConfigError(
                    f"--data {shown(Path(data))}: found {path.suffix}, expected a dataset YAML. Write one; a COCO "
                    "JSON file or a list of images goes under its `train:` or `val:`."
                )
            if path.suffix.lower() in _ARCHIVES:
                raise ConfigError(
                    f"--data {shown(Path(data))}: found an archive, expected a dataset YAML. Unpack it, and give the "
                    "folder or its data.yaml."
                )
            return absolute(path)
    if os.path.isdir(given):  # noqa: PTH112
        return _yaml_in_folder(given)
    if kind := special_file_kind(given):
        raise ConfigError(f"--data {shown(Path(data))}: found {kind}, expected a dataset YAML.")
    known = sorted(path.name for path in _FOLDER.glob("*.yaml"))
    is_bare = given.name == str(given)
    hint = did_you_mean(given.name, [*known, *(Path(name).stem for name in known)]) if is_bare else ""
    places = "\n  ".join(map(shown, tried))
    raise ConfigError(
        f"--data {shown(Path(data))}: no such dataset YAML.{hint} Tried\n  {places}\n"
        f"The repository has {', '.join(known)}."
    )


def _yaml_in_folder(folder: Path) -> Path:
    inside = sorted(path.name for path in folder.glob("*.y*ml") if path.suffix in (".yaml", ".yml"))
    own = [name for name in ("data.yaml", "data.yml", *inside[: len(inside) == 1]) if name in inside]
    if own:
        logger.info(f"--data {shown(folder)}: using {shown(own[0])} in it")
        return absolute(folder / own[0])
    found = f"a folder with {first_of(list(map(shown, inside)), 4)}" if inside else "a folder without a YAML"
    raise ConfigError(
        f"--data {shown(folder)}: found {found}, expected a dataset YAML, or a folder with data.yaml. Give the path of "
        "one, or write one with train, val and names."
    )


def _refuse_misspelled(found: YamlMapping) -> None:
    """Raise for keys that look like typos of ours; other unknown keys belong to other tools."""
    for key, value in found.values.items():
        if isinstance(key, str) and key not in _KEYS:
            absent = [known for known in _KEYS if known not in found.values and _is_typo(key, known)]
            if absent:
                raise ConfigError(f"{found.at(key)}: unknown key {shown(key)}. Did you mean {shown(absent[0])}?")
            split = _OTHER_WORD.fullmatch(key.lower())
            if split and isinstance(value, (str, list, float)) and found.values.get(split[1]) != value:
                beside = " Both are there: remove one." if split[1] in found.values else ""
                raise ConfigError(f"{found.at(key)}: unknown key {shown(key)}. Did you mean {shown(split[1])}?{beside}")


def _is_typo(key: str, known: str) -> bool:
    """Return whether two letters are swapped, one is added, missing or replaced, or only the case differs."""
    if key.lower() == known or sorted(key) == sorted(known):
        return True
    if abs(len(key) - len(known)) > 1 or min(len(key), len(known)) < 3:
        return False
    start = next((at for at, (a, b) in enumerate(zip(key, known, strict=False)) if a != b), min(len(key), len(known)))
    rest, other = key[start:], known[start:]
    return rest[1:] == other or rest == other[1:] or rest[1:] == other[1:]


def _is_coco(found: YamlMapping) -> bool:
    """Return whether every entry is a COCO file."""
    named = [text for stated in map(found.values.get, SPLITS) for text in path_texts(stated)]
    return bool(named) and all(text.lower().endswith(".json") for text in named)


def _coco_category_names(spec: DatasetSpec) -> list[str]:
    """Return the categories of the train and val COCO files by ascending id."""
    trained = {split: entries for split, entries in spec.splits.items() if split != "test"}  # which may be missing
    named = ((split, entry) for split, entries in (trained or spec.splits).items() for entry in entries)
    files = list(dict.fromkeys(file for split, entry in named for file in expand_entry(spec, split, entry)))
    first = _category_names(files[0])
    for file in files[1:]:
        names = _category_names(file)
        if names != first:
            odd = sorted(set(first) ^ set(names)) or names
            raise ConfigError(
                f"{spec.yaml_path}: names: missing, and the categories of {shown(files[0])} and {shown(file)} differ "
                f"({first_of(list(map(shown, odd)), 5)}). Write `names:` with the classes of both."
            )
    return first


def _category_names(file: Path) -> list[str]:
    """Return the categories of a COCO file, cached, as the file may have hundreds of megabytes."""
    key = hashlib.blake2b(os.fsencode(file), digest_size=10).hexdigest()
    state = f"{file} {stats([str(file)]).tolist()}".encode("utf-8", "surrogateescape")
    content = cached_content(
        cache_dir() / "index" / f"coco-names-{key}", state, lambda: json.dumps(read_category_names(file)).encode()
    )
    names: list[str] = json.loads(content)
    return names


def _val_fraction(found: YamlMapping) -> ValFraction | None:
    """Parse `val: 0.2`, a fraction of train held out for validation, and `split_seed`."""
    fraction, seed = found.values.get("val"), found.values.get("split_seed", 0)
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise ConfigError(f"{found.at('split_seed')}: split_seed: found {shown(seed)}, expected an integer from 0 on.")
    if isinstance(fraction, str) and _FRACTION_AS_TEXT.fullmatch(fraction):
        fraction = math.nan  # refused below
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        if "split_seed" in found.values:
            raise ConfigError(
                f"{found.at('split_seed')}: split_seed: found without a fraction as `val`. Write `val: 0.2` to hold "
                "out a fifth of train, or remove split_seed."
            )
        return None
    if not 0 < fraction < 1:
        raise ConfigError(
            f"{found.at('val')}: val: found {shown(found.values['val'])}, expected a folder, or a fraction of train "
            "between 0 and 1. Write 0.2 for a fifth."
        )
    if not found.values.get("train"):
        raise ConfigError(
            f"{found.at('val')}: val: {fraction:g} is a fraction of train, which is missing. Add `train:`."
        )
    return ValFraction(float(fraction), seed)


def _keypoints(found: YamlMapping) -> int:
    """Return the count of numbers of the keypoints of `kpt_shape`."""
    shape = found.values.get("kpt_shape")
    shape = [0, 2] if shape is None else shape
    is_pair = isinstance(shape, list) and len(shape) == 2 and all(type(number) is int for number in shape)
    if not is_pair or shape[0] < 0 or shape[1] not in (2, 3):
        raise ConfigError(
            f"{found.at('kpt_shape')}: kpt_shape: found {shown(shape)}, expected [17, 3] or the like: the number of "
            "keypoints, and 2 (x y) or 3 (x y visibility)."
        )
    return int(shape[0] * shape[1])


def _entries(
    found: YamlMapping, held_out: ValFraction | None
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[tuple[str, ...] | None, ...]]]:
    """Return split → its entries as written, and split → the classes that each labels, as in `DatasetSpec.labelled`.

    An empty entry counts as missing.
    """
    entries: dict[str, tuple[str, ...]] = {}
    labelled: dict[str, tuple[tuple[str, ...] | None, ...]] = {}
    for split in SPLITS:
        stated = found.values.get("train" if held_out and split == "val" else split)
        if stated is None or stated in ("", []):
            continue
        items = [_entry(found, split, item) for item in as_list(stated)]
        entries[split] = tuple(text for text, _ in items)
        if any(classes is not None for _, classes in items):
            labelled[split] = tuple(classes for _, classes in items)
    if not entries:
        raise ConfigError(f"{found.name}: found none of train, val and test, expected at least one with images.")
    return entries, labelled


def _entry(found: YamlMapping, split: str, item: object) -> tuple[str, tuple[str, ...] | None]:
    """Return an entry as written, and the classes that it labels; None = all."""
    text, classes = item, None
    if isinstance(item, dict):
        text, classes = item.get("path"), item.get("labelled")
        is_list = isinstance(classes, list) and all(isinstance(name, (str, int, float)) for name in classes)
        if set(item) != {"path", "labelled"} or not is_list:
            wrong = next((str(key) for key in item if key not in ("path", "labelled")), "")
            raise ConfigError(
                f"{found.at(split)}: {split}: found {shown(item)}, expected {{path: images/new, labelled: [bird]}}, "
                f"with names of classes; [] for images without labels.{did_you_mean(wrong, ('path', 'labelled'))}"
            )
    if not isinstance(text, str) or not text or is_address(text):
        raise ConfigError(
            f"{found.at(split)}: {split}: found {shown(text)}, expected a folder, a list of images (.txt), a glob, a "
            "COCO file (.json), or a list of those. Write the URL of an archive as `download:`."
        )
    return text, None if classes is None else tuple(map(str, classes))


def _labelled(
    found: YamlMapping, spec: DatasetSpec, names: Sequence[str]
) -> dict[str, tuple[tuple[str, ...] | None, ...]]:
    """Return `DatasetSpec.labelled` with classes in the order of `names`, after checking them."""
    labelled = {}
    for split, lists in spec.labelled.items():
        for name in (name for classes in lists for name in classes or () if name not in names):
            raise ConfigError(
                f"{found.at(split)}: {split}: labelled: found {shown(name)}, expected names of trained classes such as "
                f"{first_of(list(map(shown, names)), 4)}.{did_you_mean(name, names)}"
            )
        every = (None if own is None else tuple(name for name in names if name in own) for own in lists)
        labelled[split] = tuple(None if own == tuple(names) else own for own in every)
    return labelled


def _archives(found: YamlMapping) -> tuple[tuple[Archive, ...], str]:
    """Return the archives of `download`, and an error message if it holds anything but URLs."""
    stated = found.values.get("download")
    if stated is None or stated == "":
        return (), ""
    where = found.at("download")
    archives: list[Archive] = []
    for item in stated if isinstance(stated, list) else [stated]:
        known = isinstance(item, dict) and "url" in item and set(item) <= {"url", "into"}
        url, into = (item["url"], item.get("into", "")) if known else (item, "")
        text = url.strip() if isinstance(url, str) else ""
        if not text.startswith(("http://", "https://")) or len(text.split()) != 1:
            line = next(iter(item.strip().splitlines()), "") if isinstance(item, str) else item
            return (), (
                f"{where}: download: found {shown(line)}, expected the URL of an archive (https://….zip or .tar.gz) or "
                "several, each optionally with `into`. Scripts are refused, never run: download the dataset by hand"
            )
        if not isinstance(into, str) or PurePosixPath(into).is_absolute() or ".." in PurePosixPath(into).parts:
            raise ConfigError(
                f"{where}: download: into: found {shown(into)}, expected a folder below the datasets directory."
            )
        user_path(into, f"{where}: download: into")
        archives.append(Archive(text, into))
    return tuple(archives), ""
