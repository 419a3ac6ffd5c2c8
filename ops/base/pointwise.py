"""Pointwise operators: one input, one output of the same shape and type, each element on its own.

A class says how a piece is computed (`passes`); `pointwise` gives it its schema and registers it. The classes are in
`activation` and `unary`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT_TYPES, TypeMeta
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import operator
from dagexec.core.schema import Cost, Formula, InplaceRule, OperatorCall, OpSchema, TensorType, memory_cost, one_to_one
from dagexec.core.traits import ImageRole, PostOpsRule
from dagexec.ops.base.blocks import Array, Index, Scratch, blockwise

Check = Callable[[OperatorCall], object]


class Pointwise(Operator):
    """Base of the pointwise operators.

    Attributes:
        constants: the float arguments, by name, with their defaults.
        check: raises ArgumentError for invalid arguments.
    """

    constants: ClassVar[Mapping[str, float]] = {}
    check: ClassVar[Check | None] = None

    def prepare(self) -> Step:
        """The passes over the whole tensor, cut into pieces when there are several."""
        x, y = self.x(0), self.y(0)
        if x.flags.c_contiguous and y.flags.c_contiguous:
            x, y = x.reshape(-1), y.reshape(-1)
        return blockwise(self, x, y, self._passes)

    def constant(self, name: str) -> float:
        """The value of float argument `name`."""
        return self.arguments.float(name, self.constants[name])

    @abstractmethod
    def passes(self, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        """The NumPy calls that compute `y` from `x`, which may be the same array."""

    def _passes(self, _index: Index, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        return self.passes(x, y, scratch)


class UfuncOperator(Pointwise):
    """A pointwise operator that is one NumPy function."""

    ufunc: ClassVar[Callable[..., Any]]

    def passes(self, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        return [partial(type(self).ufunc, x, out=y)]


PointwiseClass = TypeVar("PointwiseClass", bound=type[Pointwise])


def pointwise(
    name: str,
    doc: str,
    args: Mapping[str, str] | None = None,
    *,
    metas: tuple[TypeMeta, ...] = FLOAT_TYPES,
    flops: float = 1.0,
    inplace: InplaceRule = one_to_one,
    check: Check | None = None,
    onnx: OnnxName | None = None,
    formula: Formula | None = None,
    post_ops: Sequence[str] | PostOpsRule = (),
    **traits: Any,
) -> Callable[[PointwiseClass], PointwiseClass]:
    """Class decorator: register a Pointwise class as operator `name`.

    `args` is the help text of each argument, `metas` the element types it takes, `flops` the work of an element;
    `check` raises ArgumentError for invalid arguments, before anything runs; `onnx` is the ONNX operator
    that it is, `formula` what it computes in float64 (see OpSchema). `post_ops` is what it is as post-ops, with the
    class's constants by name, such as "elu:{alpha}", or a rule; `traits` are further attributes of its schema.
    """

    def register(cls: PointwiseClass) -> PointwiseClass:
        cls.check = None if check is None else staticmethod(check)

        def infer(call: OperatorCall) -> list[TensorType]:
            call.require_types(0, *metas)
            for constant, default in cls.constants.items():
                call.arguments.float(constant, default)
            if check is not None:
                check(call)
            return [call.inputs[0]]

        def cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
            return memory_cost(call, outputs, flops)

        schema = OpSchema(
            name,
            infer=infer,
            doc=doc,
            input_names=("X",),
            output_names=("Y",),
            args=args or {},
            inplace=inplace,
            cost=cost,
            onnx=() if onnx is None else (onnx,),
            formula=formula,
            post_ops=post_ops if callable(post_ops) else _written_with(cls.constants, post_ops),
            **{"image_role": ImageRole.ELEMENTWISE, **traits},
        )
        operator(schema)(cls)
        return cls

    return register


def _written_with(constants: Mapping[str, float], entries: Sequence[str]) -> PostOpsRule | None:
    """The rule that writes the values of `constants` in `entries`; None for no entries."""
    if not entries:
        return None

    def rule(arguments: Arguments, _meta: TypeMeta, _count: int) -> Sequence[str]:
        values = {name: repr(arguments.float(name, default)) for name, default in constants.items()}
        return [entry.format(**values) for entry in entries]

    return rule


def clip_pass(x: Array, low: float, high: float, out: Array) -> Step:
    """The pass `out = min(max(x, low), high)`, for arrays of one dtype; NaN stays.

    `ndarray.clip` is used because on long arrays it is three times as fast as `np.maximum` with a scalar.
    """
    scalar: Callable[[float], np.generic] = x.dtype.type
    if x.size < 1024 and low == -np.inf:
        return partial(np.minimum, x, scalar(high), out=out)
    if x.size < 1024 and high == np.inf:
        return partial(np.maximum, x, scalar(low), out=out)
    return partial(x.clip, scalar(low), scalar(high), out=out)


def scalar_pass(ufunc: Callable[..., Any], x: Array, value: float, out: Array) -> Step:
    """The pass `out = ufunc(x, value)`, the value rounded to the arrays' dtype."""
    constant: npt.NDArray[Any] = np.asarray(value, x.dtype)
    return partial(ufunc, x, constant, out=out)


def logistic_denominator(x: Array, out: Array) -> list[Step]:
    """The passes `out = 1 + exp(-x)`: infinite far below `logistic_floor`."""
    return [partial(np.negative, x, out=out), partial(np.exp, out, out=out), scalar_pass(np.add, out, 1.0, out)]


def logistic_floor(dtype: np.dtype[Any]) -> float:
    """An x below which 1 / (1 + exp(-x)) is zero to any use (1e-38 in float32), and above which exp(-x) is finite."""
    return -700.0 if dtype == np.float64 else -88.0
