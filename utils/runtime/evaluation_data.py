"""The dataset that a model is measured on: which one, and whether the two fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tessera.data.source.annotations.class_matching import match_classes, renamed_classes
from tessera.data.source.dataset_yaml import load_spec
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.flags.program import called
from tessera.utils.flags.val import MeasuringConfig
from tessera.utils.runtime.model import Model
from tessera.utils.text import counted, first_of, printable
from tessera.utils.types import DatasetSpec

log = logging.getLogger(__name__)


def read_dataset(data: str, weights: str, trained_on: str) -> DatasetSpec:
    """The dataset of `--data`, else the one that the weights were trained on; each "" where it is not known.

    Raises:
        UserError: none is known, it is not there, or has a mistake.
    """
    if data:
        return load_spec(data)
    if not trained_on:
        raise ConfigError(
            f"--data: none given, and {weights} does not say which dataset it was trained on. Give a dataset "
            "YAML, such as --data coco128.yaml."
        )
    log.info(f"--data {trained_on}: what {weights} was trained on.")
    try:
        return load_spec(trained_on)
    except UserError as error:
        raise UserError(f"{error} It is what {weights} was trained on; give another with --data.") from error


def classes_of(names: Sequence[str], spec: DatasetSpec, given: str, *, single_cls: bool) -> tuple[int, ...]:
    """Return the dataset's class for each class of a model, by name; -1 for one that the dataset lacks.

    A line says which are left out, and which classes of the dataset the model does not know. Where no name is known and
    there are as many classes, they are taken by number, with a warning.

    Args:
        names: of the model's classes.
        spec: the dataset.
        given: what named the model, for messages, such as "--weights best.pt".
        single_cls: all classes are one.

    Raises:
        UserError: no class is known by name, and the numbers of classes differ.
    """
    if single_cls:
        return (0,) * len(names)
    found = match_classes(spec.names, names)
    known = set(found) - {-1}
    if not known and len(names) == spec.nc:
        renamed = renamed_classes(names, spec.names)
        log.warning(f"{given}: {spec.yaml_path} has as many classes, but others ({renamed}): taken by number.")
        return tuple(range(len(names)))
    if not known:
        kept, remedy = f"names {spec.nc}", "Give the YAML that the weights were trained with"
        if spec.parts:
            kept = f"has {spec.nc} of {len(spec.label_names)} by `classes`"
            remedy += " (with `classes` or without it as it was there)"
        raise UserError(
            f"{given} knows {counted(len(names), 'class')}, but {spec.yaml_path} {kept}, none of them by the same "
            f"name. {remedy}, or ignore classes with --single-cls ({called('val.py')}, {called('compare.py')})."
        )
    if found != tuple(range(spec.nc)):
        left_out, unknown = len(names) - len(known), [name for c, name in enumerate(spec.names) if c not in known]
        report = f"{given}: {len(known)} of {spec.nc} classes of {spec.yaml_path} known by name"
        if not (left_out or unknown):
            report += ", in another order"
        if left_out:
            report += f"; detections of the model's other {left_out} are left out"
        if unknown:
            listed = printable(first_of(unknown, 5))
            report += f"; unknown, with an AP of 0 in the mean for each that has labels: {listed}"
        log.log(logging.WARNING if unknown else logging.INFO, f"{report}.")
    return found


def check_pixels(model: Model, spec: DatasetSpec) -> None:
    """Warn where images of more than 8 bits come in other levels than in the model's training."""
    if model.pixels != spec.pixels:
        log.warning(
            f"{model.source} was trained with `pixels: {model.pixels or 'none'}`, but {spec.yaml_path} has "
            f"{spec.pixels or 'none'}: images of more than 8 bits come in other levels than in training."
        )


def image_size(model: Model, config: MeasuringConfig) -> int:
    """Long side of the images in pixels: as asked for, else what the model was trained at or made for."""
    imgsz = model.usable_imgsz(config.imgsz)
    asked = " (--imgsz)" if config.imgsz and not model.fixed_imgsz else ""
    log.info(f"Measured at {imgsz} px{asked}: {model.source} {model.imgsz_origin}.")
    return imgsz
