"""Indexes and checks of a dataset by its YAML, and whether two indexes are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tessera.data.source.checks.dataset import check_dataset
from tessera.data.source.checks.report import DatasetCheck
from tessera.data.source.index import build_index
from tessera.data.source.spec import load_spec
from tessera.utils.types import DatasetIndex

BOX = "0 0.5 0.5 0.5 0.5\n"


def build(yaml: Path, split: str = "train", **options: Any) -> DatasetIndex:
    return build_index(load_spec(yaml), split, **options)


def check(yaml: Path, single_cls: bool = False) -> DatasetCheck:
    return check_dataset(load_spec(yaml), single_cls)


def same(a: DatasetIndex, b: DatasetIndex) -> bool:
    plain = all(getattr(a, name) == getattr(b, name) for name in ("split", "names", "digest", "problems", "notes"))
    arrays = {name: value for name, value in vars(a).items() if isinstance(value, np.ndarray)}
    return plain and all(
        np.array_equal(value, getattr(b, name)) and value.dtype == getattr(b, name).dtype
        for name, value in arrays.items()
    )
