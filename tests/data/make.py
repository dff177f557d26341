"""Small datasets for tests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np


def write_image(path: Path, size_hw: tuple[int, int] = (48, 64), seed: int = 0) -> Path:
    """An image of noise, in the format of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size_hw, 3), np.uint8)
    assert cv2.imwrite(str(path), pixels)
    return path


def write_dataset(root: Path, labels: Mapping[str, str | bytes | None], names: str = "[cat, dog]") -> Path:
    """A dataset with one image a label ("train/a" → its text, None for no file); returns its YAML."""
    for seed, (place, text) in enumerate(labels.items()):
        write_image(root / "images" / f"{place}.jpg", seed=seed)
        if text is not None:
            label = root / "labels" / f"{place}.txt"
            label.parent.mkdir(parents=True, exist_ok=True)
            label.write_bytes(text if isinstance(text, bytes) else text.encode())
    splits = "".join(f"{split}: images/{split}\n" for split in dict.fromkeys(place.split("/")[0] for place in labels))
    yaml = root.parent / f"{root.name}.yaml"
    yaml.write_text(f"path: {root}\n{splits}names: {names}\n")
    return yaml


def replace_unseen(path: Path, old: bytes, new: bytes) -> None:
    """As archives with fixed times do: equal size, equal modification time."""
    before = path.stat()
    raw = path.read_bytes()
    assert old in raw
    path.unlink()
    path.write_bytes(raw.replace(old, new, 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
