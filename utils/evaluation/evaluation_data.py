"""Dataset of an evaluation: selection, class matching and consistency checks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tessera.data.labels.classes import match_classes, renamed_classes
from tessera.data.source.dataset_yaml import load_spec
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.evaluation.network import Model
from tessera.utils.flags.program import called
from tessera.utils.flags.val import EvaluationConfig
from tessera.utils.image_size import ImageSize
from tessera.utils.text import escape_control, first_of, plural
from tessera.utils.types import DatasetSpec

log = logging.getLogger(__name__)


def read_dataset(data: str, weights: str, trained_on: str) -> DatasetSpec:
    """Load the dataset of `--data`; without, that of the training, which is not downloaded ("" = unknown).

    Raises:
        UserError: both are unknown, or the dataset is missing or invalid.
    """
    if data:
        return load_spec(data)
    if not trained_on:
        raise ConfigError(
            f"--data: not given, and {weights} does not say which dataset it was trained on. Give a dataset YAML, such "
            "as --data coco128.yaml."
        )
    log.info(f"--data {trained_on}: the dataset that {weights} was trained on.")
    try:
        return load_spec(trained_on, obtain=False)
    except UserError as error:
        raise UserError(f"{error} {weights} was trained on it; give another dataset with --data.") from error


def model_classes(names: Sequence[str], spec: DatasetSpec, given: str, *, single_cls: bool) -> tuple[int, ...]:
    """Return the dataset class of each class of a model, matched by name; -1 = missing in the dataset.

    Differences are logged. Where no name matches but the number of classes does, classes are matched by index, with a
    warning; a UserError where the numbers differ too. `given` names the model in messages, such as "--weights best.pt".
    """
    if single_cls:
        return (0,) * len(names)
    found = match_classes(spec.names, names)
    known = set(found) - {-1}
    if not known and len(names) == spec.nc:
        renamed = renamed_classes(names, spec.names)
        log.warning(f"{given}: classes are matched by index, as {spec.yaml_path} has other names ({renamed}).")
        return tuple(range(len(names)))
    if not known:
        raise UserError(
            f"{given} knows {plural(len(names), 'class')}, but {spec.yaml_path} has {spec.nc}, none of them by the "
            "same name. Give the YAML of the training (with the same `classes`), or ignore classes with --single-cls "
            f"({called('val.py')}, {called('compare.py')})."
        )
    if found != tuple(range(spec.nc)):
        left_out, unknown = len(names) - len(known), [name for c, name in enumerate(spec.names) if c not in known]
        report = f"{given}: {len(known)} of {spec.nc} classes of {spec.yaml_path} known by name"
        if not (left_out or unknown):
            report += ", in another order"
        if left_out:
            report += f"; detections of the model's other {left_out} are ignored"
        if unknown:
            listed = escape_control(first_of(unknown, 5))
            report += f"; unknown (an AP of 0 in the mean for each with labels): {listed}"
        log.log(logging.WARNING if unknown else logging.INFO, f"{report}.")
    return found


def check_pixels(model: Model, spec: DatasetSpec) -> None:
    """Warn where images of more than 8 bits are converted differently than in the model's training."""
    if model.pixels != spec.pixels:
        log.warning(
            f"{model.source} was trained with `pixels: {model.pixels or 'none'}`, but {spec.yaml_path} has "
            f"{spec.pixels or 'none'}: images of more than 8 bits have other levels than in training."
        )


def evaluation_imgsz(model: Model, config: EvaluationConfig) -> ImageSize:
    """Return the size of the images: `--imgsz`, or else the size of the model."""
    imgsz = model.check_imgsz(config.imgsz)
    given = " (--imgsz)" if config.imgsz and not model.fixed_imgsz else ""
    log.info(f"Evaluating at {imgsz} px{given}: {model.source} {model.imgsz_origin}.")
    return imgsz
