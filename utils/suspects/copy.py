"""A copy of a dataset: links to its pictures, and label files of its own, which may have suggestions applied."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tessera.data.conversion.new_folder import new_folder
from tessera.data.source.annotations.classes import keys_of
from tessera.data.source.annotations.label_files import label_path
from tessera.data.source.scan import label_lines
from tessera.utils.errors import UserError
from tessera.utils.evaluation.label_files import output_stems
from tessera.utils.files import atomic_write, write_whole
from tessera.utils.suspects.corrections import Change, corrected, label_rows
from tessera.utils.suspects.files import suspect_row
from tessera.utils.suspects.ranking import Suspect
from tessera.utils.text import shown, strict_json
from tessera.utils.types import DatasetIndex, DatasetSpec

CHANGES = "changes.jsonl"
_LINKED = "images"  # folder of the links; labels are where the reader looks for those of such pictures


def write_copy(
    folder: Path,
    spec: DatasetSpec,
    indexes: Sequence[DatasetIndex],
    suspects: Mapping[int, Sequence[Suspect]],
    lists: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
) -> list[Change]:
    """Write the copy of some splits, whole or not at all; the others are named as in the dataset.

    Args:
        folder: not there, or empty.
        spec: the dataset.
        indexes: of the splits that are copied.
        suspects: by image of the first split, those that are applied.
        lists: name of a further YAML → split → which images of the first split it has, in place of all.

    Returns:
        What was changed.

    Raises:
        UserError: it cannot be written, or a label file has changed meanwhile.
    """
    changes, links = list[Change](), dict[str, list[str]]()
    with new_folder(folder.expanduser().absolute()) as staged:
        for index in indexes:
            applied = suspects if index is indexes[0] else {}
            links[index.split] = _write_split(staged, spec, index, applied, changes)
        _write_yaml(staged / f"{spec.name}.yaml", spec, {split: [f"{_LINKED}/{split}"] for split in links})
        for name, parts in (lists or {}).items():
            texts = {split: [f"{name}-{split}.txt"] for split in parts}
            for split, images in parts.items():
                lines = [f"./{links[indexes[0].split][image]}\n" for image in images]
                (staged / texts[split][0]).write_text("".join(lines), "utf-8", "surrogateescape")
            _write_yaml(staged / f"{name}.yaml", spec, texts | {s: [f"{_LINKED}/{s}"] for s in links if s not in parts})
    return changes


def _write_split(
    staged: Path,
    spec: DatasetSpec,
    index: DatasetIndex,
    suspects: Mapping[int, Sequence[Suspect]],
    changes: list[Change],
) -> list[str]:
    """Links and labels of a split; the links, from the folder."""
    images = range(len(index))
    labels = label_lines(spec, index, images)
    stems = output_stems([index.path(image) for image in images])
    links, rows = [], []
    for image in images:
        if image not in labels:
            raise UserError(f"{shown(index.path(image))}: it is not there any more. Run the command again.")
        picture = index.path(image).absolute()
        link = staged / _LINKED / index.split / f"{stems[image]}{picture.suffix}"
        target = Path(label_path(str(link)))
        for path in (link, target):
            path.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(picture)
        found = label_rows(index, image, labels[image], spec)
        height, width = index.sizes_hw[image].tolist()
        for change in corrected(found, suspects.get(image, ()), spec, (height, width)):
            changes.append(change)
            place = {"copy": os.path.relpath(target, staged), "before": change.before, "after": change.after}
            rows.append({**suspect_row(change.suspect, index, labels[image]), **place})
        write_whole(target, "".join(f"{row}\n" for row in found.rows).encode("utf-8", "surrogateescape"))
        links.append(os.path.relpath(link, staged))
    if rows:
        with atomic_write(staged / CHANGES) as file:
            file.writelines(f"{strict_json(row)}\n".encode() for row in rows)
    return links


def _write_yaml(target: Path, spec: DatasetSpec, copied: Mapping[str, list[str]]) -> None:
    """The dataset's YAML, with other entries for the splits that were copied."""
    others = {split: [str(entry) for entry in entries] for split, entries in spec.splits.items()}
    content: dict[str, Any] = {"path": ".", **others, **copied, **keys_of(spec)}
    if spec.pixels:
        content["pixels"] = spec.pixels.as_dict()
    target.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), "utf-8")
