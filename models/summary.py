"""Model summary: layers, parameters and GFLOPs."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from tessera.models.detector import DetectionModel

_COUNTED = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.SyncBatchNorm)


def count_parameters(model: nn.Module) -> int:
    """Count the parameters, including frozen ones."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_gflops(model: DetectionModel, imgsz: int = 640) -> float:
    """Return the GFLOPs for one square image: twice the multiply-adds of convolutions, linear and norm layers.

    Activations, pools, decoding and attention products are not counted. The counts are taken on an image of one cell of
    the largest stride, and scaled by the area. The model keeps its mode.
    """
    multiply_adds = 0

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal multiply_adds
        # Each output takes as many multiply-adds as one output channel has weights; one in a normalisation.
        multiply_adds += output.numel() * cast(Tensor, module.weight)[0].numel()

    parameter = next(model.parameters())
    image = torch.zeros(1, model.channels, model.stride, model.stride, dtype=parameter.dtype, device=parameter.device)
    modes = {module: module.training for module in model.modules()}
    hooks = [module.register_forward_hook(add) for module in modes if isinstance(module, _COUNTED)]
    model.eval()
    try:
        with torch.no_grad():
            model(image)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    return 2 * multiply_adds * (imgsz / model.stride) ** 2 / 1e9


def summary(model: DetectionModel, imgsz: int = 640) -> str:
    """Return a line such as "yolov5n: 214 layers, 1,872,157 parameters, 4.5 GFLOPs", for images of `imgsz` pixels."""
    layers = sum(not isinstance(module, nn.Identity) for module in model.modules())
    gflops = count_gflops(model, imgsz)
    return (
        f"{model.name}: {layers} layers, {count_parameters(model):,} parameters, "
        f"{gflops:.{1 if gflops >= 1 else 2}f} GFLOPs"
    )
