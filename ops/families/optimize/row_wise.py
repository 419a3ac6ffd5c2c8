"""Sparse updates that keep one number a row for the size of the gradient, instead of one an element."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.operator import Step
from dagexec.ops.base.blocks import Scratch
from dagexec.ops.families.optimize.adam import ADAM_ARGS, AdamRule
from dagexec.ops.families.optimize.adaptive import EPSILON_ARGS
from dagexec.ops.families.optimize.sparse import DEDUPLICATE, SparseUpdate
from dagexec.ops.families.optimize.update import Array, Parts, Piece, PieceRule, Shape, update_operator


def mean_square(grad: Array, work: Array) -> Array:
    """The mean of the squares of each row, as a column; `work` has the gradient's shape."""
    np.multiply(grad, grad, out=work)
    return np.asarray(np.mean(work, axis=1, keepdims=True))


class RowWiseAdagradRule(PieceRule):
    """h' = h + mean of g^2 over the row; param' = param + rate / (sqrt(h') + epsilon) * g."""

    def __init__(self, arguments: Arguments, dtype: npt.DTypeLike, label: str) -> None:
        """Raises ArgumentError for a negative epsilon."""
        super().__init__(arguments, dtype, label)
        self.epsilon = self.argument("epsilon", 1e-5, 0, math.inf)

    def steps(self, piece: Piece, scratch: Scratch) -> list[Step]:
        """The formulas of the class; the state is a column."""
        (squares,), grad, work = piece.state, piece.grad, scratch(0, piece.grad.shape)
        param, epsilon = piece.param, np.asarray(self.epsilon, self.dtype)
        assert param is not None

        def change() -> None:
            np.add(squares, mean_square(grad, work), out=squares)
            np.multiply(grad, self.of_run["rate"] / (np.sqrt(squares) + epsilon), out=work)
            np.add(param, work, out=param)

        return [change]


@update_operator(
    "RowWiseSparseAdagrad",
    "Adagrad of the rows that `indices` names, with one moment a row: h' = h + mean of g^2 over the row; "
    "param' = param + rate / (sqrt(h') + epsilon) * g.",
    inputs=("param", "moment", "indices", "grad", "rate"),
    outputs=("param", "moment"),
    args=EPSILON_ARGS | DEDUPLICATE,
    enforced=(0, 1),
)
class RowWiseSparseAdagrad(SparseUpdate):
    """Adagrad on some rows, one moment a row."""

    parts = Parts(grad=3, param=0, state=(1,), rate=4, indices=2, updated={0: 0, 1: 1})
    rule = RowWiseAdagradRule

    @classmethod
    def state_shapes(cls, param: Shape) -> Sequence[Shape]:
        return [param[:1]]


class RowWiseAdamRule(AdamRule):
    """Adam, with the second moment of the row's mean of g^2."""

    def steps(self, piece: Piece, scratch: Scratch) -> list[Step]:
        """The second moment is a column."""
        (first, second), grad, work = piece.state, piece.grad, scratch(0, piece.grad.shape)
        param, extras = piece.param, [extra for extra in piece.extras if extra is not None]
        (beta1, rest1), (beta2, rest2) = [np.array([beta, 1.0 - beta], self.dtype) for beta in self.betas]
        epsilon = np.asarray(self.epsilon, self.dtype)
        assert param is not None

        def change() -> None:
            np.multiply(second, beta2, out=second)
            np.add(second, rest2 * mean_square(grad, work), out=second)
            np.multiply(first, beta1, out=first)
            np.multiply(grad, rest1, out=work)
            np.add(first, work, out=first)
            np.multiply(first, self.of_run["correction"] / (np.sqrt(second) + epsilon), out=work)
            for extra in extras:
                np.copyto(extra, work)
            np.multiply(work, self.of_run["rate"], out=work)
            if self._decay:
                np.multiply(param, self.of_run["kept"], out=param)
            np.add(param, work, out=param)

        return [change]


@update_operator(
    "RowWiseSparseAdam",
    "SparseAdam with one second moment a row: v' = beta2 v + (1 - beta2) * mean of g^2 over the row.",
    inputs=("param", "moment_1", "moment_2", "indices", "grad", "rate", "iteration"),
    outputs=("param", "moment_1", "moment_2", "step"),
    least_outputs=3,
    args=ADAM_ARGS | DEDUPLICATE,
    enforced=(0, 1, 2),
    flops=5,
)
class RowWiseSparseAdam(SparseUpdate):
    """Adam on some rows, one second moment a row."""

    parts = Parts(
        grad=4, param=0, state=(1, 2), rate=5, iteration=6, indices=3, updated={0: 0, 1: 1, 2: 2}, extras=(3,)
    )
    rule = RowWiseAdamRule

    @classmethod
    def state_shapes(cls, param: Shape) -> Sequence[Shape]:
        """A moment for each element, and one for each row."""
        return [param, param[:1]]
