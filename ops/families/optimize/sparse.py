"""Updates by a sparse gradient: only the rows that it is of change.

The operators get `indices` and, for each index, a row of the gradient. Rows of one index that occurs more than once are
applied one after the other in the order of the indices, as Caffe2 does; with argument `deduplicate` they are added up
first, in that order, and applied once, which is what the dense rule would do to the row. The k-th occurrences of all
indices are applied together, so that whole blocks of rows go through NumPy at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dagexec.core.dtypes import INT32, INT64
from dagexec.core.operator import Array, Step
from dagexec.core.schema import OperatorCall
from dagexec.ops.base.blocks import Scratch
from dagexec.ops.families.index.indexing import check_indices
from dagexec.ops.families.optimize.adam import ADAM_ARGS, RectifiedAdamRule
from dagexec.ops.families.optimize.adaptive import ADADELTA_ARGS, EPSILON_ARGS, AdadeltaRule, AdagradRule
from dagexec.ops.families.optimize.ftrl import FTRL_ARGS, FTRL_DOC, FtrlRule, ftrl_state
from dagexec.ops.families.optimize.momentum import MOMENTUM_ARGS, MomentumRule
from dagexec.ops.families.optimize.update import PIECE, Parts, Piece, PieceRule, Shape, Update, update_operator


def occurrences(indices: Array) -> Iterator[Array]:
    """Places in a 1-D array, in groups: of each index the first occurrences, then the second ones, and so on."""
    count = indices.size
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    fresh = np.concatenate(([True], ordered[1:] != ordered[:-1])) if count else np.zeros(0, bool)
    starts = np.flatnonzero(fresh)
    if starts.size == count:
        yield np.arange(count)
        return
    rank = np.arange(count) - np.repeat(starts, np.diff(np.append(starts, count)))
    by_rank = order[np.argsort(rank, kind="stable")]
    ends = np.cumsum(np.bincount(rank))
    yield from np.split(by_rank, ends[:-1])


class Deduplicated:
    """The rows of a gradient, those of one index added up.

    Attributes:
        rows: the sums; of each run the first `count` are valid.
    """

    def __init__(self, grad: Array, gathered: Array, rows: Array) -> None:
        """`grad` (n x row) is what is added up; the others, of the same shape, are memory to work in."""
        self._grad = grad
        self._gathered = gathered
        self.rows = rows

    def add_up(self, indices: Array) -> Array:
        """Add up, in the order of the indices; the place of the first occurrence of each, by which rows are sorted."""
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        np.take(self._grad, order, axis=0, out=self._gathered, mode="clip")
        np.add.reduceat(self._gathered, starts, axis=0, out=self.rows[: starts.size])
        return order[starts]


class SparseUpdate(Update):
    """An update of the rows of a parameter, all state included, that `indices` names."""

    @classmethod
    def gradient_shape(cls, call: OperatorCall) -> Shape:
        """A row for each index. Raises ShapeError for indices that are no integers."""
        parts = cls.parts
        assert parts.indices is not None
        call.require_types(parts.indices, INT32, INT64)
        param = call.inputs[parts.reference].shape
        if not param:
            raise call.fail("the parameter must have rows, found one without axes")
        return (*call.inputs[parts.indices].shape, *param[1:])

    def prepare(self) -> Step:
        """Check the indices, then, a block of rows at a time: gather, apply the rule, scatter."""
        parts, rule = self.parts, self.make_rule()
        assert parts.indices is not None
        assert parts.param is not None
        indices = self.x(parts.indices).reshape(-1)
        count, param = indices.size, self.target(parts.param)
        height = param.shape[0]
        begin, copies, label = self.beginning(rule), self.moved(), self.label
        if count == 0 or param.size == 0:
            return in_order([begin, lambda: check_indices(indices, 0, height, label)])
        blocks = RowBlocks(self, rule, param, count)
        deduplicated = None
        if self.arguments.bool("deduplicate"):
            shape = (count, param.size // height)
            grad = self.x(parts.grad).reshape(shape)
            deduplicated = Deduplicated(grad, self.scratch(shape, grad.dtype), self.scratch(shape, grad.dtype))

        def update() -> None:
            check_indices(indices, 0, height, label)
            begin()
            for target, source in copies:
                np.copyto(target, source)
            if deduplicated is not None:
                first = deduplicated.add_up(indices)
                blocks.clear_extras()
                blocks.apply(indices[first], first, deduplicated.rows)
                return
            for places in occurrences(indices):
                blocks.apply(indices[places], places, None)

        return update


def in_order(steps: Sequence[Callable[[], object]]) -> Step:
    """A step that calls `steps`, each of them."""

    def run() -> None:
        for step in steps:
            step()

    return run


class RowBlocks:
    """Rows of a parameter and its state, some at a time, in memory where a rule can work on them."""

    def __init__(self, owner: SparseUpdate, rule: PieceRule, param: Array, count: int) -> None:
        """`count` is how many rows the gradient has."""
        parts = owner.parts
        height = param.shape[0]
        width = param.size // height
        self._rule = rule
        self._length = max(1, min(count, PIECE // width))
        self._grad = owner.x(parts.grad).reshape(count, width)
        self._tables = [param.reshape(height, width)]
        self._tables += [owner.target(source).reshape(height, -1) for source in parts.state]
        self._extras = [owner.y(o).reshape(count, width) if o < len(owner.output_blobs) else None for o in parts.extras]
        dtype = param.dtype
        self._work = Piece(
            owner.scratch((self._length, width), dtype),
            tuple(owner.scratch((self._length, table.shape[1]), dtype) for table in self._tables[1:]),
            owner.scratch((self._length, width), dtype),
            tuple(None if extra is None else owner.scratch((self._length, width), dtype) for extra in self._extras),
        )
        self._scratch = Scratch(owner, self._length * width, dtype)
        self._steps: dict[int, tuple[Piece, list[Step]]] = {}
        self._for(self._length)

    def _for(self, count: int) -> tuple[Piece, list[Step]]:
        """Rows to work on, `count` or up to twice as many, and the rule's steps for them.

        So there are few numbers of rows that steps are made for; what is in the rows behind does not matter.
        """
        size = min(self._length, 1 << (count - 1).bit_length())
        if size not in self._steps:
            work = self._work
            assert work.param is not None
            extras = tuple(None if extra is None else extra[:size] for extra in work.extras)
            piece = Piece(work.param[:size], tuple(one[:size] for one in work.state), work.grad[:size], extras)
            self._steps[size] = piece, self._rule.steps(piece, self._scratch)
        return self._steps[size]

    def clear_extras(self) -> None:
        """Fill the extra outputs with zeros."""
        for extra in self._extras:
            if extra is not None:
                extra.fill(0)

    def apply(self, rows: Array, places: Array, grad: Array | None) -> None:
        """Apply the rule to `rows`, all different, whose gradients are in `places`; or in `grad`, in the order of rows.

        Extra outputs go to `places`.
        """
        for start in range(0, rows.size, self._length):
            chosen, there = rows[start : start + self._length], places[start : start + self._length]
            size = chosen.size
            piece, steps = self._for(size)
            work = [array[:size] for array in (piece.param, *piece.state) if array is not None]
            for table, buffer in zip(self._tables, work, strict=True):
                np.take(table, chosen, axis=0, out=buffer, mode="clip")
            if grad is None:
                np.take(self._grad, there, axis=0, out=piece.grad[:size], mode="clip")
            else:
                np.copyto(piece.grad[:size], grad[start : start + size])
            for step in steps:
                step()
            for table, buffer in zip(self._tables, work, strict=True):
                table[chosen] = buffer
            for extra, found in zip(self._extras, piece.extras, strict=True):
                if extra is not None and found is not None:
                    extra[there] = found[:size]


DEDUPLICATE = {
    "deduplicate": "1: rows of an index that occurs more than once are added up first and applied once; an extra "
    "output then has the result where the index occurs first, and zeros at the others (default 0: applied in order)"
}


@update_operator(
    "SparseMomentumSGDUpdate",
    "MomentumSGDUpdate of the rows that `indices` names; `grad` has a row for each index.",
    inputs=("grad", "momentum", "rate", "param", "indices"),
    outputs=("step", "momentum", "param"),
    args=MOMENTUM_ARGS | DEDUPLICATE,
    enforced=(1, 2),
    flops=5,
)
class SparseMomentumSGDUpdate(SparseUpdate):
    """Momentum on some rows."""

    parts = Parts(
        grad=0, param=3, state=(1,), rate=2, indices=4, updated={1: 1, 2: 3}, extras=(0,), overwrites_grad=True
    )
    rule = MomentumRule


@update_operator(
    "SparseAdagrad",
    "Adagrad of the rows that `indices` names; `grad` has a row for each index.",
    inputs=("param", "moment", "indices", "grad", "rate"),
    outputs=("param", "moment"),
    args=EPSILON_ARGS | DEDUPLICATE,
    enforced=(0, 1),
)
class SparseAdagrad(SparseUpdate):
    """Adagrad on some rows."""

    parts = Parts(grad=3, param=0, state=(1,), rate=4, indices=2, updated={0: 0, 1: 1})
    rule = AdagradRule


@update_operator(
    "SparseAdam",
    "Adam of the rows that `indices` names; `grad` has a row for each index, and so has `step`.",
    inputs=("param", "moment_1", "moment_2", "indices", "grad", "rate", "iteration"),
    outputs=("param", "moment_1", "moment_2", "step"),
    least_outputs=3,
    args=ADAM_ARGS | DEDUPLICATE | {"enableRAdam": "1: rectified Adam, arXiv:1908.03265 (default 0)"},
    enforced=(0, 1, 2),
    flops=5,
)
class SparseAdam(SparseUpdate):
    """Adam on some rows."""

    parts = Parts(
        grad=4, param=0, state=(1, 2), rate=5, iteration=6, indices=3, updated={0: 0, 1: 1, 2: 2}, extras=(3,)
    )
    rule = RectifiedAdamRule


@update_operator(
    "SparseAdadelta",
    "Adadelta of the rows that `indices` names; `grad` has a row for each index.",
    inputs=("param", "moment", "moment_delta", "indices", "grad", "rate"),
    outputs=("param", "moment", "moment_delta"),
    args=ADADELTA_ARGS | DEDUPLICATE,
    enforced=(0, 1, 2),
    flops=6,
)
class SparseAdadelta(SparseUpdate):
    """Adadelta on some rows."""

    parts = Parts(grad=4, param=0, state=(1, 2), rate=5, indices=3, updated={0: 0, 1: 1, 2: 2})
    rule = AdadeltaRule


@update_operator(
    "SparseFtrl",
    FTRL_DOC + " Of the rows that `indices` names; `grad` has a row for each index.",
    inputs=("param", "n_z", "indices", "grad", "alpha"),
    outputs=("param", "n_z"),
    least_inputs=4,
    args=FTRL_ARGS | DEDUPLICATE,
    enforced=(0, 1),
    flops=8,
)
class SparseFtrl(SparseUpdate):
    """FTRL on some rows."""

    parts = Parts(grad=3, param=0, state=(1,), rate=4, indices=2, updated={0: 0, 1: 1})
    rule = FtrlRule

    @classmethod
    def state_shapes(cls, param: Shape) -> Sequence[Shape]:
        return ftrl_state(param)
