"""Apple's GPUs, which compute without float64."""

from __future__ import annotations

import torch

from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.batch_norm import BatchNormParts


class Metal(Accelerator):
    """The Metal device of a Mac. Its kernels of the optimizers cannot skip a step by a flag on the device."""

    kind = "mps"
    batch_norm = BatchNormParts()
    fused_optimizers = False
    widest = torch.float32
    is_host = False
    onnx_providers = ("CoreMLExecutionProvider", "CPUExecutionProvider")
    openvino_device = ""

    @property
    def native_dtype(self) -> torch.dtype:
        """float32: autocast on Metal has no counterpart of the checks that training relies on."""
        return torch.float32

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def reserved_memory(self) -> int:
        return torch.mps.driver_allocated_memory()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or (isinstance(error, RuntimeError) and "out of memory" in str(error))
