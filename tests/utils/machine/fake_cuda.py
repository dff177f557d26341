"""A CUDA device that is not there: torch computes shapes, types and devices on it, and no values.

Tensors on `cuda:0` are torch's FakeTensors, those on the host are real. Errors are: an operation that mixes devices; a
value, or a shape that depends on one, that the host asks for; inside `no_waiting()` a copy that the host waits for; and
a gradient of another type than its tensor, which torch would cast. Copies to the host are what was sent from it, else
zeros. Streams and events do nothing. Not seen are memory of kernels, and values that gradients of real tensors read.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tessera.utils.machine.accelerator import Cuda
from tests.utils.machine.stand_in import TensorMemory

aten = torch.ops.aten
KERNELS: dict[Any, Callable[..., Any]] = {  # shapes that torch does not know itself
    aten._fused_sgd_.default: lambda *_, **__: None,
    aten._amp_update_scale_.default: lambda scale, *_: scale,
    aten.batch_norm_stats.default: lambda x, _: (x[0, :, 0, 0].float(), x[0, :, 0, 0].float()),
    aten.batch_norm_elemt.default: lambda x, *_: torch.empty_like(x),
    aten.batch_norm_backward_reduce.default: lambda _, x, *__: (x[0, :, 0, 0].float(),) * 4,
    aten.batch_norm_backward_elemt.default: lambda _, x, *__: torch.empty_like(x),
}


SORTED = {aten.index_put_.default, aten.scatter_.src, aten.scatter_add_.default}  # to be deterministic or to accumulate


class FakeCuda(TensorMemory, Cuda):
    """The device, inside the context."""

    name = "fake"

    def __init__(self, capacity: int = 2**40) -> None:
        super().__init__(torch.device("cuda", 0), capacity)
        self._may_wait, self._stack = True, ExitStack()
        self._unpacked: list[list[Tensor]] = []  # saved tensors that a node of the backward asked for

    def __enter__(self) -> FakeCuda:
        enter, nothing = self._stack.enter_context, MagicMock()
        queue = {"Stream": nothing, "Event": nothing, "current_stream": nothing, "synchronize": self.wait}
        enter(patch.multiple(torch.cuda, stream=lambda _: nullcontext(), is_bf16_supported=lambda: True, **queue))
        enter(patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        enter(patch.multiple(Tensor, record_stream=nothing, backward=lambda loss: self._backward(loss)))
        enter(patch.object(torch.utils, "swap_tensors", lambda old, new: setattr(old, "data", new)))  # in Module.to
        hooks = lambda tensor: [tensor], lambda saved: self._unpacked.append(saved) or saved[0]
        enter(torch.autograd.graph.saved_tensors_hooks(*hooks))
        enter(FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False))
        enter(_Operations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Inside, waiting is an error."""
        self._may_wait = False
        try:
            yield
        finally:
            self._may_wait = True

    def wait(self, *what: object) -> None:
        if not self._may_wait:
            raise RuntimeError(f"the host waits for the device: {what}")

    @torch.no_grad()
    def _backward(self, loss: Tensor) -> None:
        """Tensor.backward in Python: torch's engine asks the driver for the device of each node."""
        grads: dict[Any, list[Tensor | None]] = {loss.grad_fn: [torch.ones_like(loss)]}
        uses, todo = Counter[Any](), [loss.grad_fn]
        while todo:
            nodes = [node for node, _ in todo.pop().next_functions if node is not None]
            todo += [node for node in dict.fromkeys(nodes) if node not in uses]
            uses.update(nodes)
        todo = [loss.grad_fn]
        while todo:
            node = todo.pop()
            edges, given = node.next_functions, grads.pop(node)
            for grad, wanted in zip(given, node._input_metadata, strict=True):
                expected = torch.Size(wanted.shape), wanted.dtype, wanted.device
                assert grad is None or (grad.shape, grad.dtype, grad.device) == expected, (node, grad, expected)
            made = node.apply(*given) if hasattr(node, "apply") else node(*given)
            made = made if isinstance(made, tuple) else (made,)
            if hasattr(node, "needs_input_grad"):  # a Function in Python, whose inputs are not tensors alone
                made = tuple(grad for grad, needed in zip(made, node.needs_input_grad, strict=True) if needed)
                edges = [edge for edge in edges if edge[0] is not None]
            for (following, number), grad in zip(edges, made, strict=True):
                if following is not None:
                    slots = grads.setdefault(following, [None] * len(following._input_metadata))
                    if grad is not None:
                        slots[number] = grad if slots[number] is None else slots[number] + grad
                    uses[following] -= 1
                    todo += [following] if uses[following] == 0 else []
            for saved in self._unpacked:
                saved.clear()
            self._unpacked.clear()
            del given, made, grad


class _Operations(TorchDispatchMode):
    """Operations with a tensor of the device, or that make one, are fake; the others are computed."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()
        self._device = device
        self._pinned: weakref.WeakSet[Any] = weakref.WeakSet()  # storages
        self._sent: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()  # by storage: constants

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        to = torch.device(kwargs.get("device") or "cpu").type
        if func is aten._pin_memory.default or kwargs.get("pin_memory"):
            x, is_copy = args[0], func is aten._pin_memory.default
            with unset_fake_temporarily():
                pinned = x.clone() if is_copy else torch.zeros(x.shape, dtype=x.dtype)
            self._pinned.add(pinned.untyped_storage())
            return pinned
        if to != "cuda" and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is aten.copy_.default or (func is aten._to_copy.default and "device" in kwargs):
            source, target = (args[1], args[0]) if func is aten.copy_.default else (args[0], None)
            ends = source.device.type, to if target is None else target.device.type
            host = source if ends[0] == "cpu" else target
            is_pinned = host is not None and host.untyped_storage() in self._pinned
            if ends != ("cuda", "cuda") and not (is_pinned and (kwargs.get("non_blocking") or args[2:] == (True,))):
                self._device.wait("copy", *ends)
            if ends[1] == "cpu":
                with unset_fake_temporarily():
                    return (
                        torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
                        if target is None
                        else target
                    )
        elif any(tensor.device.type == "cpu" and tensor.dim() for tensor in tensors):
            raise RuntimeError(f"{func} of the device takes a tensor of the host")
        elif func in SORTED and (torch.are_deterministic_algorithms_enabled() or args[3:] == (True,)):
            self._device.wait("for the largest index")
        result = KERNELS.get(func, func)(*args, **kwargs)
        if func is aten._to_copy.default and not isinstance(args[0], FakeTensor):
            self._sent[result.untyped_storage()] = args[0]
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor):
                self._device.allocate(tensor)
        return result
