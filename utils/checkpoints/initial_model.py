"""Initial model of a run, from `--cfg` or the weights, with fitting tensors of `--weights` and frozen layers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tessera.data.source.annotations.class_matching import has_placeholder_names, match_classes
from tessera.models.detector import DetectionModel
from tessera.models.heads.head import Head
from tessera.models.model_yaml import read_model
from tessera.utils.checkpoints.foreign import efficientnet_lite
from tessera.utils.checkpoints.resolve import resolve_weights
from tessera.utils.checkpoints.resume import ResumedRun
from tessera.utils.checkpoints.transfer import intersect_weights
from tessera.utils.checkpoints.weights import Weights, load_weights
from tessera.utils.config import AUTO, OWN_WEIGHTS, Hyp, TrainConfig
from tessera.utils.errors import ConfigError
from tessera.utils.text import escape_control, first_of, plural
from tessera.utils.types import Pretraining

log = logging.getLogger(__name__)

DEFAULT_MODEL = "tessera-n.yaml"  # named in the help of --cfg, too


def read_weights(config: TrainConfig, resumed: ResumedRun | None) -> Weights | None:
    """Read the file of `--weights`; None from scratch and for a resumed run. For auto it is that of a small dataset."""
    name = config.weights if config.weights != AUTO else "" if config.cfg else OWN_WEIGHTS
    if not name or resumed:
        return None
    if name == efficientnet_lite.NAME:
        file, imported = efficientnet_lite.imagenet_weights(config.cfg)
        source = f"{file} (ImageNet, Apache-2.0)"
        return Weights(imported.state_dict, imported.model_yaml, (), source, family=efficientnet_lite.FAMILY)
    return load_weights(resolve_weights(name))


def pretraining_of(config: TrainConfig, names: Sequence[str], weights: Weights | None) -> Pretraining:
    """Return the kind of weights that a model for the classes `names` starts from; "scratch" for a resumed run."""
    if weights is None:
        return "scratch"
    if weights.family == efficientnet_lite.FAMILY:
        return "backbone"
    knows_all = -1 not in match_classes(weights.names, names)
    has_names = not (has_placeholder_names(names) or has_placeholder_names(weights.names))
    own_model = not config.cfg or _is_model_of(weights, config.cfg)
    return "known" if knows_all and has_names and own_model else "new"


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


def head_class(config: TrainConfig, names: Sequence[str], weights: Weights | None = None) -> type[Head]:
    """Return the head's class of a fresh run's model before it is built."""
    return read_model(model_source(config, weights), {"nc": len(names)}).head


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
        model = DetectionModel(described, names=names, anchors=round(hyp.anchors) or None)
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
    layers, flag = len(model.model), f"--freeze {' '.join(map(str, config.freeze))}"
    frozen = config.frozen_layers
    if max(frozen, default=0) >= layers:
        raise ConfigError(
            f"{flag}: {model.name} has {plural(layers, 'layer')}, 0 to {layers - 1}. --freeze {layers - 1} trains the "
            "head alone."
        )
    for name, parameter in model.layer_parameters(frozen):
        parameter.requires_grad_(False)
        log.debug(f"frozen: {name}")
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if not trained:
        raise ConfigError(
            f"{flag}: nothing left to train in {model.name}, which has {plural(layers, 'layer')}, 0 to {layers - 1}. "
            f"Freeze fewer: --freeze {layers - 1} trains the head alone."
        )
    if frozen:
        log.info(f"{flag}: training {trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters.")
        if weights is None and not resumed:
            log.warning(f"{flag} without --weights: the frozen layers keep their random initial values.")
    return model


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
