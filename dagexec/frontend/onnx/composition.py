"""Composition: the operators that one node becomes where no single operator computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT32
from dagexec.core.node import Node
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, UnknownSizeError


class Composition:
    """Operators under a node's name, in the order in which they run; each call adds one and names its output."""

    def __init__(self, node: OnnxNode) -> None:
        self.node = node
        self.operators: list[Node] = []

    def __call__(self, op_type: str, *inputs: str, **arguments: ArgumentValue | None) -> str:
        """An operator of one output, which gets a new name. Arguments that are None are left out."""
        output = self.node.new_name(op_type)
        self.operators.append(self.node.operator(op_type, inputs, [output], **arguments))
        return output

    def result(self, op_type: str, *inputs: str, **arguments: ArgumentValue | None) -> list[Node]:
        """All operators, the last of which computes the node's first output.

        Raises CannotConvertError when another output is used as well.
        """
        return [*self.operators, self.node.operator(op_type, inputs, self.node.only_output(), **arguments)]

    def finish(self) -> list[Node]:
        """All operators; the result of the last is the node's first output, whose name it gets.

        Raises CannotConvertError when another output is used as well.
        """
        self.operators[-1] = self.operators[-1].changed(outputs=self.node.only_output())
        return self.operators

    def split(self, name: str, count: int, axis: int, sizes: list[int] | None = None) -> list[str]:
        """The tensor cut along `axis` into `count` parts, equal ones without `sizes`."""
        parts = [self.node.new_name("Split") for _ in range(count)]
        self.operators.append(self.node.operator("Split", [name], parts, axis=axis, split=sizes))
        return parts

    def along(self, vector: str, trailing: int) -> str:
        """A vector with `trailing` axes of size 1 after its own; scalars, and tensors of more axes, stay."""
        shape = self.node.shape_of(vector)
        if shape is None:
            raise UnknownSizeError(f"the model does not state the shape of {vector!r}")
        if len(shape) != 1 or not trailing:
            return vector
        target = [-1, *[1] * trailing]
        values = self.node.value_of(vector)
        return self("Reshape", vector, shape=target) if values is None else self.constant(values.reshape(target))

    def multiplier(self, a: str, b: str, divisor: str = "") -> str:
        """(a * b) / divisor in float32; constants are multiplied here."""
        values = [self.node.value_of(name) for name in (a, b, divisor) if name]
        if any(value is None for value in values):
            first, *rest = (self("Cast", name, to=FLOAT32.number) for name in (a, b, divisor) if name)
            product = self("Mul", first, rest[0])
            return self("Div", product, rest[1]) if divisor else product
        try:
            x, y, *z = (value.astype(np.float32) for value in values if value is not None)
            with np.errstate(all="ignore"):  # scales may be none
                return self.constant(np.asarray(x * y / z[0] if z else x * y))
        except ValueError as error:
            raise CannotConvertError(f"scales {a!r}, {b!r} and {divisor!r} do not fit: {error}") from None

    def constant(self, values: npt.NDArray[Any]) -> str:
        """A new parameter of the model."""
        name = self.node.new_name("constant")
        values.flags.writeable = False
        self.node.scope.values[name] = values
        return name
