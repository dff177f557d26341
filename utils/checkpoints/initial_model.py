"""Initial model of a run, from `--cfg` or the weights, with fitting tensors of `--weights` and frozen layers."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tessera.data.labels.classes import has_placeholder_names, match_classes
from tessera.models.detector import DetectionModel
from tessera.models.model_yaml import read_model
from tessera.utils.checkpoints.resume import ResumedRun
from tessera.utils.checkpoints.weights import (
    IMAGENET,
    Weights,
    load_weights,
    own_head,
    resolve_weights,
    tensor_differences,
)
from tessera.utils.config import AUTO, OWN_WEIGHTS, Hyp, TrainConfig
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.extensions import extension
from tessera.utils.text import escape_control, first_of, plural
from tessera.utils.types import Pretraining

log = logging.getLogger(__name__)

DEFAULT_MODEL = "tessera-n.yaml"  # named in the help of --cfg, too
DRAWN = "drawn "  # begins the class names of weights pretrained on synthetic shapes (examples/pretrain.py)
_OTHER = "another architecture"
_LEAST_FRACTION = 0.05  # fraction of a model's weights; what fits by chance is less
_USUAL_FRACTION = 0.5


def read_weights(config: TrainConfig, resumed: ResumedRun | None) -> Weights | None:
    """Read the file of `--weights`; None from scratch and for a resumed run. For auto it is that of a small dataset."""
    name = config.weights if config.weights != AUTO else "" if config.cfg else OWN_WEIGHTS
    if not name or resumed:
        return None
    if name == IMAGENET:
        weights: Weights = extension("ImageNet weights").imagenet_weights(config.cfg)
        return weights
    return load_weights(resolve_weights(name))


def pretraining_of(config: TrainConfig, names: Sequence[str], weights: Weights | None) -> Pretraining:
    """Return what a model for the classes `names` begins with; "scratch" for a resumed run."""
    if weights is None:
        return "scratch"
    if weights.is_backbone:
        return "backbone"
    knows_all = -1 not in match_classes(weights.names, names)
    has_names = not (has_placeholder_names(names) or has_placeholder_names(weights.names))
    own_model = not config.cfg or _is_model_of(weights, config.cfg)
    if knows_all and has_names and own_model:
        return "known"
    return "drawn" if weights.names and all(name.startswith(DRAWN) for name in weights.names) else "new"


def _is_model_of(weights: Weights, cfg: str) -> bool:
    """Return whether a model YAML describes the model of the weights, but for its classes."""
    expected = _layers_of(cfg)
    try:
        return _layers_of(weights.model_yaml) == expected
    except ConfigError:  # of another program, with its own layers
        return False


def _layers_of(described: str | Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a model YAML says but its classes."""
    spec = read_model(described, {"nc": 1})
    rows = [(row.sources, row.repeats, row.module, *map(str, row.arguments)) for row in spec.layers]
    return spec.width, str(spec.activation or nn.SiLU()), spec.head_keys, *rows


def model_source(
    config: TrainConfig, weights: Weights | None = None, resumed: ResumedRun | None = None
) -> str | Mapping[str, Any]:
    """Return the model's YAML name or content: the resumed run's, `--cfg`, or the weights'."""
    if resumed:
        return dict(resumed.checkpoint["model_yaml"])
    return config.cfg or (weights and weights.model_yaml) or DEFAULT_MODEL


def build_model(
    config: TrainConfig,
    hyp: Hyp,
    names: Sequence[str],
    weights: Weights | None = None,
    resumed: ResumedRun | None = None,
) -> DetectionModel:
    """Build the raw model on the CPU, the same on every rank, with weights and frozen layers.

    Raises:
        UserError: the weights do not fit the architecture.
        ConfigError: a missing or invalid model YAML, or an invalid --freeze.
    """
    with torch.random.fork_rng(devices=[]):  # the same on every rank
        torch.default_generator.manual_seed(config.seed)
        described = model_source(config, weights, resumed)
        model = DetectionModel(described, names=names, anchors=round(hyp.anchors) or None, head=own_head(config.head))
    if weights is not None:
        # The YAML of another model has its own values, such as anchors.
        keeps_values = not config.cfg or pretraining_of(config, names, weights) == "known"
        yaml_values = [] if keeps_values else [rf"\.{name}$" for name in model.head.yaml_tensors]
        own, offered = model.state_dict(), match_class_layers(model, weights)
        fitting, rest = intersect_weights(
            own, offered.whole, source=config.weights, exclude=yaml_values, partial=offered.partial.keys()
        )
        model.load_state_dict({**fitting, **offered.partial}, strict=False)
        log.info(f"Loaded {len(fitting)} of {len(own)} tensors from {weights.source}{offered.report}{rest}")
    _freeze(model, config)
    if config.frozen_layers and weights is None and not resumed:
        log.warning(f"{_freeze_flag(config)} without --weights: the frozen layers keep their random initial values.")
    return model


def _freeze_flag(config: TrainConfig) -> str:
    return f"--freeze {' '.join(map(str, config.freeze))}"


def _freeze(model: DetectionModel, config: TrainConfig) -> None:
    """Freeze the layers of --freeze; ConfigError if the model does not have them, or nothing is left to train."""
    layers, flag, frozen = len(model.model), _freeze_flag(config), config.frozen_layers
    if max(frozen, default=0) >= layers:
        raise ConfigError(
            f"{flag}: {model.name} has {plural(layers, 'layer')}, 0 to {layers - 1}. --freeze {layers - 1} trains the "
            "head alone."
        )
    for _, parameter in model.layer_parameters(frozen):
        parameter.requires_grad_(False)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if not trained:
        raise ConfigError(
            f"{flag}: nothing left to train in {model.name}, which has {plural(layers, 'layer')}, 0 to {layers - 1}. "
            f"Freeze fewer: --freeze {layers - 1} trains the head alone."
        )
    if frozen:
        log.info(f"{flag}: training {trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters.")


def freeze_bn_of_first_layers(model: DetectionModel, config: TrainConfig, hyp: Hyp, weights: Weights | None) -> Hyp:
    """Fix the statistics of the first `hyp.fixed_norms` layers in a run from weights.

    Return the hyperparameters with `fixed_norms` reduced to the layers that were loaded completely. For a resumed run,
    `weights` is None and nothing is reduced.
    """
    layers = min(round(hyp.fixed_norms), len(model.model)) if config.weights else 0
    if weights is not None:
        fits = {name: t.shape for name, t in match_class_layers(model, weights).whole.items()}
        reinitialised = (
            index
            for index, layer in enumerate(model.model)
            for name, t in layer.state_dict(prefix=f"model.{index}.").items()
            if fits.get(name) != t.shape
        )
        layers = min(layers, next(reinitialised, layers))
    model.freeze_bn_statistics(layers)
    if any(index >= layers for index in config.frozen_layers):
        log.info("The frozen normalisation layers still update their statistics.")
    return dataclasses.replace(hyp, fixed_norms=float(layers)) if config.weights else hyp


def with_frozen_layers(config: TrainConfig, hyp: Hyp) -> TrainConfig:
    """Return a fresh run's flags with the layers that the hyperparameters freeze, unless --freeze is given."""
    if config.weights and not config.freeze and hyp.frozen_layers:
        return dataclasses.replace(config, freeze=(round(hyp.frozen_layers),))
    return config


# ---------------------------------------------------------------------------------------------- transfer of weights


class _MatchedWeights(NamedTuple):
    """Weights with the class layers in the order of a model's classes."""

    whole: dict[str, Tensor]  # complete tensors
    partial: dict[str, Tensor]  # class layers in which some outputs are the model's own
    report: str  # known classes, for the log; "" if the class layers do not fit


def match_class_layers(model: DetectionModel, weights: Weights) -> _MatchedWeights:
    """Return weights with the class layers in the order of a model's classes, matched by name."""
    prefix, known = f"model.{len(model.model) - 1}.", match_classes(weights.names, model.names)
    of_head = {name.removeprefix(prefix): t for name, t in weights.state_dict.items() if name.startswith(prefix)}
    made = model.head.class_tensors(of_head, len(weights.names), known)
    layers = {prefix + name: tensor for name, tensor in made.items()}
    if not layers:
        return _MatchedWeights(weights.state_dict, {}, "")
    names = [name for name, number in zip(model.names, known, strict=True) if number >= 0]
    by_number = names and (has_placeholder_names(weights.names) or has_placeholder_names(model.names))
    by = "number" if by_number else "name"
    listed = f" ({escape_control(first_of(names, 5))})" if names and by == "name" else ""
    report = f"; class layer: {len(names)} of {model.nc} classes known by {by}{listed}"
    if len(names) == model.nc:
        return _MatchedWeights({**weights.state_dict, **layers}, {}, report)
    whole = {name: tensor for name, tensor in weights.state_dict.items() if name not in layers}
    return _MatchedWeights(whole, layers, f"{report}, {model.nc - len(names)} reinitialised")


def intersect_weights(
    model_state: Mapping[str, Tensor],
    checkpoint_state: Mapping[str, Tensor],
    *,
    source: str = "the checkpoint",
    exclude: Iterable[str] = (),
    partial: Collection[str] = (),
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a checkpoint that fit a model by name and shape, and a report of the others.

    A warning is logged if weights of another architecture initialise less than half of the model.

    Args:
        source: names the checkpoint in messages.
        exclude: regular expressions; tensors with a matching name are not loaded.
        partial: names of tensors that are loaded in part, elsewhere.

    Raises:
        UserError: the weights are of another architecture.
    """
    patterns = [re.compile(pattern) for pattern in exclude]
    own, offered = (
        {k: t for k, t in state.items() if k not in partial and not any(p.search(k) for p in patterns)}
        for state in (model_state, checkpoint_state)
    )
    fitting = {k: t for k, t in offered.items() if k in own and t.shape == own[k].shape}
    different = tensor_differences(own, offered)
    # Counters, norms and anchors are not counted: they have equal shapes in several sizes of a family.
    numbers = {k: t.numel() for k, t in own.items() if k.endswith(".weight") and t.ndim >= 2}
    fraction = sum(numbers.get(k, 0) for k in fitting) / max(1, sum(numbers.values()))  # of the model's weights
    why = _why_not_all(own, offered)
    other = why == _OTHER
    if fraction == 0 or (other and fraction < _LEAST_FRACTION):
        among = f"{fraction:.1%} of the layers' weights" if fraction else "no layer's weights"
        raise UserError(
            f"{source}: the weights do not fit the architecture: {len(fitting)} of {len(model_state)} tensors fit, "
            f"with {among} ({different}). Give the --cfg that belongs to the weights, or no --cfg."
        )
    if other and fraction < _USUAL_FRACTION:
        log.warning(
            f"{source}: only {fraction:.0%} of the model's layers start from these weights, which are of another "
            "architecture. If that is not intended, give the --cfg that belongs to them, or no --cfg."
        )
    report = ""
    if excluded := len(model_state) - len(own) - len(partial):
        report += f"; {excluded} excluded"
    if different:
        lacking = len(own) - len(fitting)
        report += f"; {f'reinitialised {lacking}' if lacking else 'others unused'} ({why}): {different}"
    return fitting, report


def _why_not_all(own: Mapping[str, Tensor], offered: Mapping[str, Tensor]) -> str:
    """Return the reason why a checkpoint fits a model in part: classes, head, or architecture."""
    fitting = {name for name in own if name in offered and own[name].shape == offered[name].shape}
    unfit = (own.keys() | offered.keys()) - fitting
    head = max((name for name in own if name.startswith("model.")), key=_layer, default="")
    if not head or any(_layer(name) not in (_layer(head), -1) for name in unfit):
        return _OTHER
    return "different classes" if own.keys() == offered.keys() else "another kind of head"


def _layer(name: str) -> int:
    """Return 24 for "model.24.m.0.weight"; -1 for a tensor of no layer."""
    found = re.match(r"model\.(\d+)\.", name)
    return int(found[1]) if found else -1
