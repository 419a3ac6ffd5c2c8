"""Losses on CUDA that give a number a row of tensors of one shape, and their gradients: distances, cross entropies."""

from __future__ import annotations

import math

import numpy as np

from dagexec.core.operator import Step, nothing_to_do
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda, registered_kinds
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.families.loss import cross_entropy, distance, sigmoid
from dagexec.ops.families.loss.rows import RowGradient, RowLoss, all_but_last, first_axis

_HELPERS = r"""
template <class A> __device__ inline A softplus_tail(A x) { return log1p(exp(-magnitude(x))); }
template <class W> struct products {
    W both, x, y;
    __device__ void begin() { both = W(0); x = W(0); y = W(0); }
    __device__ void add(W of_both, W of_x, W of_y) { both += of_both; x += of_x; y += of_y; }
    __device__ void join(const products& other) { add(other.both, other.x, other.y); }
    __device__ static W length(W square) { return sqrt(nan_max(square, W(1e-12))); }
};
"""
"""`softplus_tail(x)` is ln(1 + exp(-|x|)); `products` are the sums that a cosine is made of."""

_PRODUCTS = Phase(
    "products<W>",
    "s.add((W)A(x * y), (W)A(x * x), (W)A(y * y));",
    "const A of_x = (A)state0::length(total0.x), of_y = (A)state0::length(total0.y);",
    size=24,
)

_LOSSES: dict[type[RowLoss], tuple[tuple[str, ...], Phase, str]] = {
    distance.SquaredL2Distance: (
        ("x", "y"),
        Phase("sum_of<W>", "s.add((W)A((x - y) * (x - y)));"),
        "z = A(0.5) * (A)total0.total;",
    ),
    distance.L1Distance: (("x", "y"), Phase("sum_of<W>", "s.add((W)magnitude(A(x - y)));"), "z = (A)total0.total;"),
    distance.DotProduct: (("x", "y"), Phase("sum_of<W>", "s.add((W)A(x * y));"), "z = (A)total0.total;"),
    distance.CosineSimilarity: (("x", "y"), _PRODUCTS, "z = (A)total0.both / of_x / of_y;"),
    cross_entropy.CrossEntropy: (
        ("x", "label"),
        Phase("sum_of<W>", "s.add((W)A(log(nan_max(x, A(1e-20))) * label));"),
        "z = -(A)total0.total;",
    ),
}
"""What of each row is summed, and the loss from that."""

_GRADIENTS: dict[type[RowGradient], tuple[tuple[str, ...], tuple[str, ...], str]] = {
    distance.SquaredL2DistanceGradient: (("x", "y"), ("dx", "dy"), "dx = (x - y) * dz; dy = -dx;"),
    distance.L1DistanceGradient: (
        ("x", "y"),
        ("dx", "dy"),
        "const A d = x - y; dx = sign_of(d) * A(magnitude(d) > A(1e-12)) * dz; dy = -dx;",
    ),
    distance.DotProductGradient: (("x", "y"), ("dx", "dy"), "dx = y * dz; dy = x * dz;"),
    cross_entropy.CrossEntropyGradient: (
        ("x", "label"),
        ("dx",),
        "dx = -(A(label / nan_max(x, A(1e-20))) * dz);",
    ),
}
_COSINE_GRADIENT = (
    "const A cosine = (A)(total0.both / ((W)of_x * (W)of_y)), unit_x = x / of_x, unit_y = y / of_y;"
    "dx = A(unit_y - unit_x * cosine) / of_x * dz; dy = A(unit_x - unit_y * cosine) / of_y * dz;"
)
_LIKELIHOOD = {
    "plain": "A(target - A(x > A(0))) * x - softplus_tail(x)",
    "log_d": "A(nan_min(x, A(0)) - softplus_tail(x)) * A(target * A(2) - A(1))",
    "unjoined": "A(softplus_tail(x) + nan_max(x, A(0))) * A(target - A(1)) + target * x",
}
_DERIVATIVE = {
    "plain": "target - logistic(x)",
    "log_d": "logistic(A(-x)) * A(target * A(2) - A(1))",
    "unjoined": "logistic(x) * A(target - A(1)) + target",
}
"""The logarithm of the likelihood of a target and its derivative: see `dagexec.ops.families.loss.sigmoid`."""


def _sigmoid_form(owner: CudaOperator) -> str:
    if owner.arguments.bool("log_D_trick"):
        return "log_d"
    return "unjoined" if owner.arguments.bool("unjoined_lr_loss") else "plain"


def _rows(owner: CudaOperator, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows, and members of each."""
    of_sigmoid = isinstance(owner, sigmoid._SigmoidLoss | sigmoid._SigmoidGradient)
    outer = (all_but_last if of_sigmoid else first_axis)(shape)
    return math.prod(outer), math.prod(shape[len(outer) :])


@on_cuda(*registered_kinds(RowLoss))
class _CudaRowLoss(CudaOperator):
    """A number a row."""

    def prepare(self) -> Step:
        shape = _rows(self, self.x(0).shape)
        given = [self.x(index).reshape(shape) for index in range(len(self.input_blobs))]
        name = type(self).schema.type
        form = next((kind for kind in type(self).__mro__ if kind in _LOSSES), None)
        if form is not None:
            names, phase, last = _LOSSES[form]
        else:
            names = ("x", "target", "weight")[: len(given)]
            weight = " * weight" if len(given) == 3 else ""
            kind = _sigmoid_form(self)
            name = f"{name}_{kind}"
            phase = Phase("sum_of<W>", f"s.add((W)A(A({_LIKELIHOOD[kind]}){weight}));")
            last = "z = -((A)total0.total / A(w.length > 1 ? w.length : 1));"
        groups = Groups([phase], last=last, helpers=_HELPERS)
        inputs = dict(zip(names, given, strict=True))
        return by_groups(self, name, shape, (1,), groups, inputs, {"z": self.y(0).reshape(shape[0], 1)})


@on_cuda(*registered_kinds(RowGradient))
class _CudaRowGradient(CudaOperator):
    """The gradients of some inputs of a loss of rows."""

    def prepare(self) -> Step:
        gradient = next(kind.gradient for kind in type(self).__mro__ if issubclass(kind, RowGradient))
        tensors = [self.x(index) for index in range(len(self.input_blobs)) if index != gradient]
        shape = _rows(self, tensors[0].shape)
        if not math.prod(shape):
            return nothing_to_do
        given: list[Array] = [tensor.reshape(shape) for tensor in tensors]
        dz = {"dz": self.x(gradient).reshape(shape[0], 1)}
        results = [self.y(index).reshape(shape) for index in range(len(self.output_blobs))]
        name = type(self).schema.type
        if isinstance(self, distance.CosineSimilarityGradient):
            inputs, outputs = dict(zip("xy", given, strict=True)), dict(zip(("dx", "dy"), results, strict=True))
            groups = Groups([_PRODUCTS], each=_COSINE_GRADIENT, helpers=_HELPERS)
            return by_groups(self, name, shape, (1,), groups, inputs | dz, outputs)
        form = next((kind for kind in type(self).__mro__ if kind in _GRADIENTS), None)
        scalars: dict[str, np.generic] = {}
        if form is not None:
            names, targets, expression = _GRADIENTS[form]
        else:
            names, targets = ("x", "target", "weight")[: len(given)], ("dx",)
            kind = _sigmoid_form(self)
            weight = " * weight" if len(given) == 3 else ""
            name, expression = f"{name}_{kind}", f"dx = A(A({_DERIVATIVE[kind]}){weight}) * A(dz / -members);"
            scalars = {"members": computed_scalar(given[0], max(1, shape[1]))}
        inputs, outputs = dict(zip(names, given, strict=True)), dict(zip(targets, results, strict=True))
        return elementwise(self, name, inputs | dz, outputs, expression, scalars, _HELPERS)
