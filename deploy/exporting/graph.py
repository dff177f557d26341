"""Builder of ONNX graph nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Value = Any  # of onnx_ir, which is imported where it is needed; or what NumPy makes an array of


class Nodes:
    """A list of nodes that grows by calls: `nodes.Add(a, b)` appends a node and returns its output or outputs.

    Inputs are values of onnx_ir, None, or NumPy arrays and numbers, which become initializers. Python integers become
    int64, other numbers float32.

    A branch shares the constants and the counter of its `parent`; `prefix` begins all names.
    """

    def __init__(self, prefix: str, parent: Nodes | None = None) -> None:
        self.nodes: list[Any] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Any] = parent._constants if parent else {}
        self._counter: Iterator[int] = parent._counter if parent else itertools.count(1)
        self._prefix = prefix

    @property
    def initializers(self) -> list[Any]:
        return list(self._constants.values())

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        if not kind[0].isupper():
            raise AttributeError(kind)

        def add(*inputs: Value, outputs: int = 1, **attributes: Any) -> Any:
            import onnx_ir as ir

            made = [ir.Value(name=self._name()) for _ in range(outputs)]
            values = [self._value(value) for value in inputs]
            self.nodes.append(ir.node(kind, values, attributes, outputs=made, name=self._name()))
            return made[0] if outputs == 1 else tuple(made)

        return add

    def cast(self, value: Value, dtype: type[np.generic]) -> Value:
        import onnx_ir as ir

        return self.Cast(value, to=int(ir.DataType.from_numpy(np.dtype(dtype))))

    def if_else(
        self,
        condition: Value,
        where_true: Callable[[Nodes], Value],
        where_false: Callable[[Nodes], Value],
        *,
        dtype: type[np.generic],
        axes: int,
    ) -> Value:
        """Return the output of an If node.

        Args:
            condition: bool, one element.
            where_true, where_false: write a branch into the nodes that they receive and return its output.
            dtype, axes: type and rank of the output; OpenCV requires them.
        """
        then = self._branch("then", where_true, dtype, axes)
        return self.If(condition, then_branch=then, else_branch=self._branch("else", where_false, dtype, axes))

    def _branch(self, name: str, write: Callable[[Nodes], Value], dtype: type[np.generic], axes: int) -> Any:
        import onnx_ir as ir

        branch = Nodes(self._prefix, self)
        output = write(branch)
        output.dtype, output.shape = ir.DataType.from_numpy(np.dtype(dtype)), ir.Shape([None] * axes)
        return ir.Graph([], [output], nodes=branch.nodes, name=f"{self._prefix}_{name}{self._name()}")

    def _name(self) -> str:
        return f"{self._prefix}_{next(self._counter)}"

    def _value(self, value: Value) -> Any:
        import onnx_ir as ir

        if value is None or isinstance(value, ir.Value):
            return value
        array = np.asarray(value)
        if not isinstance(value, (np.ndarray, np.generic)):
            array = array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self._constants:
            name = self._name()
            made = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            made.dtype, made.shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
            self._constants[key] = made
        return self._constants[key]


def typed_value(name: str, dtype: type[np.generic], shape: Sequence[int | str | None], value: Value = None) -> Any:
    """Return a graph input, or `value` as a graph output; dynamic sizes are strings in `shape`."""
    import onnx_ir as ir

    value = ir.Value() if value is None else value
    value.name, value.dtype, value.shape = name, ir.DataType.from_numpy(np.dtype(dtype)), ir.Shape(list(shape))
    return value
