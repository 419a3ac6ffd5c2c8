"""Operators that are one NumPy function of whole arrays, for those that no hot path has.

    @array_function("Stump", ...)
    def stump(call: OperatorCall, x: Array) -> tuple[Array, ...]:
        return (np.where(x <= 0, 0, 1),)

The function allocates what it works with and what it returns, in every run; its results are copied to the outputs, so
an output may overwrite an input. On devices the arrays come to the host and go back. An operator that nets spend time
in has steps of its own instead, which allocate nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dagexec.core.operator import Operator, Step
from dagexec.core.registry import by_fields, operator
from dagexec.core.schema import OperatorCall, OpSchema
from dagexec.ops.base.blocks import Array

Compute = Callable[..., Sequence[Any]]
"""From a call and the arrays of the inputs, those of the outputs, in order, or what NumPy makes such arrays of."""


class ArrayOperator(Operator):
    """Base of operators whose step works on arrays of the host, wherever the blobs are."""

    def prepare(self) -> Step:
        """The step, on the blobs' own arrays."""
        inputs = [self.x(index) for index in range(len(self.input_blobs))]
        return self.computing(inputs, [self.y(index) for index in range(len(self.output_blobs))])

    @abstractmethod
    def computing(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Step:
        """A step on arrays of the host."""


class ArrayFunction(ArrayOperator):
    """Base of operators that are one function."""

    def computing(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Step:
        """One call, and the copies."""
        call = self.call()

        def step() -> None:
            for output, found in zip(outputs, self.compute(call, *inputs), strict=True):
                np.copyto(output, np.asarray(found).reshape(output.shape), casting="unsafe")

        return step

    @staticmethod
    @abstractmethod
    def compute(call: OperatorCall, *inputs: Array) -> Sequence[Any]:
        """The outputs."""


def _computes(schema: OpSchema) -> Callable[[Compute], Compute]:

    def register(function: Compute) -> Compute:
        members = {"compute": staticmethod(function), "__doc__": function.__doc__, "__module__": function.__module__}
        operator(schema)(type(schema.type, (ArrayFunction,), members))
        return function

    return register


array_function = by_fields(OpSchema, _computes)
"""Decorator: register a new operator type, whose OpSchema has these fields, and which the function computes."""
