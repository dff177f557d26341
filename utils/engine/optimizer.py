"""Optimizer of a run: parameter groups, the choice of the optimizer, and its schedule by iteration.

One iteration is one global batch. The schedule is a pure function of it, so that a resumed run continues it exactly,
and `--epochs M` rebuilds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tessera.models.detector import DetectionModel
from tessera.utils.config import Hyp
from tessera.utils.engine.muon import Muon, is_matrix
from tessera.utils.errors import ConfigError
from tessera.utils.text import shown
from tessera.utils.user_parts import load_part

_NORMS = tuple(v for k, v in vars(nn).items() if isinstance(v, type) and "Norm" in k)
BIASES, WEIGHTS, NORM_WEIGHTS = range(3)  # `kind` of a parameter group
Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class KnownOptimizer:
    """An optimizer that `--optimizer` names.

    Attributes:
        make: factory of the type, parameter groups, lr, momentum, and whether to use fused kernels.
        family: optimizers of one family have equal states.
        rates: optimizers with one value have similar learning rates.
        state_names: returns the sets of names that the state of a parameter may have.
    """

    type: type[torch.optim.Optimizer]
    make: Callable[..., torch.optim.Optimizer]
    family: str
    rates: str
    state_names: Callable[[Tensor], tuple[frozenset[str], ...]]


def _sgd(sgd: Any, groups: Groups, lr: float, momentum: float, *, fused: bool) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = sgd(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=fused)
    for tensor in (tensor for group in groups for tensor in group["params"]):
        # torch would leave it uninitialised if the first step is skipped.
        made.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
    return made


def _adam(adam: Any, groups: Groups, lr: float, momentum: float, *, fused: bool) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = adam(groups, lr=lr, betas=(momentum, 0.999), fused=fused)
    return made


_MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq"})
_OF_MATRICES = frozenset({"step", "exp_avg", "norm_sq"})
OPTIMIZERS = {
    "SGD": KnownOptimizer(torch.optim.SGD, _sgd, "SGD", "SGD", lambda _: (frozenset(), frozenset({"momentum_buffer"}))),
    "Adam": KnownOptimizer(torch.optim.Adam, _adam, "Adam", "Adam", lambda _: (_MOMENTS,)),
    "AdamW": KnownOptimizer(torch.optim.AdamW, _adam, "Adam", "Adam", lambda _: (_MOMENTS,)),
    "Muon": KnownOptimizer(Muon, _adam, "Muon", "Adam", lambda p: (_OF_MATRICES if is_matrix(p) else _MOMENTS,)),
}


def family_of(name: str) -> str:
    """Return the family of an optimizer; a user's own, module:name, is one of its own."""
    return OPTIMIZERS[name].family if name in OPTIMIZERS else name


def rates_of(name: str) -> str:
    """Return what optimizers with similar learning rates have in common."""
    return OPTIMIZERS[name].rates if name in OPTIMIZERS else name


def build_optimizer(
    model: nn.Module, name: str, hyp: Hyp, batch_size: int, *, fused: bool = True, layer_decay: float = 1.0
) -> torch.optim.Optimizer:
    """Return an optimizer over all trainable parameters, in three groups: biases, weights, norm weights.

    Only weights decay, at hyp.weight_decay × batch · accumulation / nominal batch. A group's `kind` is its
    place in this order, and its `lr_scale` scales its learning rate. With `layer_decay` each layer has groups of its
    own (discriminative fine-tuning, arXiv 1801.06146, 2.2).

    Args:
        model: the raw model.
        name: SGD (Nesterov); Adam, AdamW or Muon, whose beta1 is the momentum; or module:name of a factory.
        batch_size: images of a global batch.
        fused: use the device's fused kernels.
        layer_decay: ratio of a layer's learning rate to the next layer's; 1 = equal rates.

    Raises:
        ConfigError: the factory returns something else than an optimizer over these groups.
    """
    layers = [*model.model] if isinstance(model, DetectionModel) and layer_decay != 1 else [model]
    decay = hyp.weight_decay * batch_size * accumulation(hyp, batch_size) / nominal_batch(hyp, batch_size)
    groups: Groups = []
    for from_head, layer in zip(reversed(range(len(layers))), layers, strict=True):
        for kind, tensors in enumerate(_tensors_by_kind(layer)):
            if tensors or len(layers) == 1:
                group = {"params": tensors, "weight_decay": decay if kind == WEIGHTS else 0.0}
                groups.append({**group, "kind": kind, "lr_scale": layer_decay**from_head})
    if known := OPTIMIZERS.get(name):
        return known.make(known.type, groups, hyp.lr0, hyp.momentum, fused=fused)
    made = load_part(name, "--optimizer")(groups, lr=hyp.lr0, momentum=hyp.momentum, weight_decay=decay)
    if not isinstance(made, torch.optim.Optimizer) or [g.get("kind") for g in made.param_groups] != [
        group["kind"] for group in groups
    ]:
        raise ConfigError(
            f"--optimizer {name}: returned {shown(type(made).__name__)}, expected a torch.optim.Optimizer over the "
            "parameter groups it is given. Pass the groups on as they are."
        )
    return made


def _tensors_by_kind(layer: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    biases: list[Tensor] = []
    weights: list[Tensor] = []
    norm_weights: list[Tensor] = []
    for module in layer.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                of_norm = isinstance(module, _NORMS)
                (biases if key.endswith("bias") else norm_weights if of_norm else weights).append(parameter)
    return biases, weights, norm_weights


def check_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a restored state that torch accepts, but with which the first step would fail."""
    known = next((known for known in OPTIMIZERS.values() if type(optimizer) is known.type), None)
    if known is None:  # a user's own
        return
    for parameter, state in optimizer.state.items():
        values = {name: value for name, value in state.items() if value is not None}
        if not isinstance(parameter, Tensor) or values.keys() not in known.state_names(parameter):
            raise ValueError(f"it has {', '.join(map(shown, state))}")
        moments = {name: value for name, value in values.items() if name != "step"}
        shapes = {**dict.fromkeys(moments, parameter.shape), "norm_sq": torch.Size()}
        if any(not isinstance(value, Tensor) or value.shape != shapes[name] for name, value in moments.items()):
            raise ValueError("its moments have other shapes than the parameters")
        if "step" in state and not (isinstance(state["step"], (int, float)) or state["step"].numel() == 1):
            raise ValueError("a parameter has several numbers of steps")


def nominal_batch(hyp: Hyp, batch_size: int) -> float:
    """Return the images per optimizer step; smaller batches are accumulated."""
    return hyp.nominal_batch or batch_size


def accumulation(hyp: Hyp, batch_size: int) -> int:
    """Return the batches per optimizer step after the warm-up. Each has its own mean loss (see `TrainStep`)."""
    return max(round(nominal_batch(hyp, batch_size) / batch_size), 1)


@dataclass(frozen=True)
class Schedule:
    """Schedule of a run by iteration."""

    hyp: Hyp
    epochs: int
    batches_per_epoch: int
    batch_size: int  # over all ranks
    cosine: bool = False  # cosine decay, regardless of `hyp`

    @property
    def iterations(self) -> int:
        """Iterations of the whole run."""
        return self.epochs * self.batches_per_epoch

    @property
    def warmup_iterations(self) -> int:
        """Iterations of the warm-up: the longest of three, at most `warmup_max_fraction` of the run."""
        hyp, batches = self.hyp, self.iterations
        length = max(hyp.warmup_epochs * self.batches_per_epoch, hyp.warmup_fraction * batches, hyp.warmup_min_batches)
        return max(round(min(length, hyp.warmup_max_fraction * batches) if hyp.warmup_max_fraction else length), 1)

    @property
    def cosine_weight(self) -> float:
        """Weight of the cosine in the decay, 0 to 1; the rest is linear."""
        return 1.0 if self.cosine else self.hyp.cosine

    def factor(self, epoch: int) -> float:
        """Return the fraction of lr0 in `epoch`: 1 in the flat part, then from 1 to lrf."""
        progress = max((epoch / self.epochs - self.hyp.flat_fraction) / (1 - self.hyp.flat_fraction), 0.0)
        curve, line = (1 + math.cos(math.pi * progress)) / 2, 1 - progress
        fall = self.cosine_weight * curve + (1 - self.cosine_weight) * line
        return fall * (1 - self.hyp.lrf) + self.hyp.lrf

    def learning_rates(self, iteration: int) -> tuple[float, float, float]:
        """Return the rates of biases, weights and norm weights; with `layer_decay`, those of the head."""
        target = self.hyp.lr0 * self.factor(iteration // self.batches_per_epoch)
        bias = self._warm(iteration, self.hyp.warmup_bias_lr, target)
        other = self._warm(iteration, 0.0, target)
        return bias, other, other

    def momentum(self, iteration: int) -> float:
        """Return SGD's momentum, or Adam's beta1."""
        return self._warm(iteration, self.hyp.warmup_momentum, self.hyp.momentum)

    def window(self, iteration: int) -> int:
        """Return how many batches the optimizer step that begins at `iteration` accumulates, all of one epoch.

        The accumulation grows within the warm-up. A step ends with the first batch at which it has enough of them.
        """
        left = self.batches_per_epoch - iteration % self.batches_per_epoch
        full = nominal_batch(self.hyp, self.batch_size) / self.batch_size
        for size in range(1, left + 1):
            needed = max(round(self._warm(iteration + size - 1, 1.0, full)), 1)
            if size >= needed:
                return size
        return left

    def steps(self) -> int:
        """Return the number of optimizer steps of the whole run."""
        warming = min(-(-self.warmup_iterations // self.batches_per_epoch), self.epochs)  # later epochs are equal
        return sum(map(self._steps_of, range(warming))) + (self.epochs - warming) * self._steps_of(warming)

    def _steps_of(self, epoch: int) -> int:
        iteration, steps = epoch * self.batches_per_epoch, 0
        while iteration < (epoch + 1) * self.batches_per_epoch:
            iteration, steps = iteration + self.window(iteration), steps + 1
        return steps

    def apply(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        """Set the rates and momentum of `build_optimizer`'s groups for the step that ends at `iteration`."""
        momentum, rates = self.momentum(iteration), self.learning_rates(iteration)
        for group in optimizer.param_groups:
            group["lr"] = rates[group["kind"]] * group["lr_scale"]
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            if "momentum" in group:
                group["momentum"] = momentum

    def _warm(self, iteration: int, start: float, end: float) -> float:
        return float(np.interp(iteration, (0, self.warmup_iterations), (start, end)))
