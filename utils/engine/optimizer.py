"""Optimizers: parameter groups by kind and layer, and steps that a flag on the device can skip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tessera.models.detector import DetectionModel
from tessera.utils.config import Hyp
from tessera.utils.engine.schedule import accumulation, nominal_batch

_NORMS = tuple(v for k, v in vars(nn).items() if isinstance(v, type) and "Norm" in k)
WEIGHTS = 1  # the kind of group with weight decay


def build_optimizer(
    model: nn.Module, name: str, hyp: Hyp, batch_size: int, *, fused: bool = True, layer_decay: float = 1.0
) -> torch.optim.Optimizer:
    """Return an optimizer over all trainable parameters, in three groups: biases, weights, norm weights.

    Only weights decay, at hyp.weight_decay × batch · accumulation / nominal batch. A group's `kind` is 0, 1 or 2 in
    this order, and its `lr_scale` scales its learning rate. With `layer_decay` each layer has groups of its own
    (discriminative fine-tuning, arXiv 1801.06146, 2.2).

    Args:
        model: the raw model.
        name: SGD (Nesterov), Adam or AdamW, whose beta1 is the momentum.
        batch_size: images of a global batch.
        fused: use the device's fused kernels.
        layer_decay: ratio of a layer's learning rate to the next layer's; 1 = equal rates.
    """
    layers = [*model.model] if isinstance(model, DetectionModel) and layer_decay != 1 else [model]
    decay = hyp.weight_decay * batch_size * accumulation(hyp, batch_size) / nominal_batch(hyp, batch_size)
    groups: list[dict[str, Any]] = []
    for from_head, layer in zip(reversed(range(len(layers))), layers, strict=True):
        for kind, tensors in enumerate(_kinds(layer)):
            if tensors or len(layers) == 1:
                group = {"params": tensors, "weight_decay": decay if kind == WEIGHTS else 0.0}
                groups.append({**group, "kind": kind, "lr_scale": layer_decay**from_head})
    if name == "SGD":
        sgd = torch.optim.SGD(groups, lr=hyp.lr0, momentum=hyp.momentum, nesterov=hyp.momentum > 0, fused=fused)
        for tensor in (tensor for group in groups for tensor in group["params"]):
            # torch would leave it uninitialised if the first step is skipped.
            sgd.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
        return sgd
    adam = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[name]
    return adam(groups, lr=hyp.lr0, betas=(hyp.momentum, 0.999), fused=fused)


def _kinds(layer: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    kinds: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
    for module in layer.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                kind = 0 if key.endswith("bias") else 2 if isinstance(module, _NORMS) else WEIGHTS
                kinds[kind].append(parameter)
    return kinds


def step_where(taken: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer if `taken`, bool () on its device, is true.

    Fused kernels skip by a flag on the device, made for torch's GradScaler, without a host synchronisation. For others
    the host reads the flag.
    """
    if not optimizer.defaults["fused"]:
        if taken:
            optimizer.step()
        return
    optimizer.found_inf = (~taken).float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.found_inf  # type: ignore[attr-defined]
