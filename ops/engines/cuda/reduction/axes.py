"""Reductions on CUDA: sums, means, extremes, products and norms over axes, and where extremes are.

float32 is summed in double, which a memory-bound kernel does not feel on a GPU for data centers, others have few units
for it; 16-bit floats are summed in float.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.engines.cuda.base.constants import constant_step
from dagexec.ops.engines.cuda.base.faults import CheckedOperator
from dagexec.ops.engines.cuda.base.kinds import on_cuda, registered_kinds
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.families.reduction import axes as reduction
from dagexec.ops.families.reduction.arg_extreme import ArgMax, ArgMin
from dagexec.ops.families.reduction.axes import AxesReader, Reduction, output_shape
from dagexec.ops.families.reduction.log_sum_exp import ReduceLogSumExp

_SQUARED = r"""
__device__ inline float squared(float x) { return x * x; }
__device__ inline double squared(double x) { return x * x; }
template <class I> __device__ inline u64 squared(I x) { return (u64)x * (u64)x; }
"""
"""Squares, in the type of the element so that they overflow as the host's; those of integers wrap."""


class PrefixOperator(CheckedOperator):
    """A reduction or its gradient, the last input of which may be lengths: see `reduction.has_lengths`."""

    @property
    def inputs_checked(self) -> Sequence[int]:
        """The lengths, where they are given."""
        return [index for index in range(len(self.input_blobs)) if self.schema.input_names[index] == "lengths"]

    def lengths_check(self, lengths: Array, most: int) -> Step:
        """A step that does nothing but check that the lengths are in [0, most]."""
        explain = partial(self._check_lengths, lengths, most)
        fault = self.fault_word(explain, IndexError(f"{self.label}: a length was not in [0, {most}]"))
        return self.values_check(lengths, 0, most + 1, fault)

    def _check_lengths(self, lengths: Array, most: int) -> None:
        reduction.check_lengths(self.fetched(lengths), most, self.label)


_FOUND = "y = (A)total0.total;"
_FORMS: dict[type[Reduction], tuple[str, Phase, str]] = {
    reduction.SumReduction: ("sum", Phase("sum_of<W>", "s.add((W)x);"), _FOUND),
    reduction.MeanReduction: ("mean", Phase("sum_of<W>", "s.add((W)x);"), "y = (A)(total0.total / (W)w.length);"),
    reduction.MaxReduction: ("max_of", Phase("max_of<A>", "s.add(x);"), "y = total0.value;"),
    reduction.MinReduction: ("min_of", Phase("min_of<A>", "s.add(x);"), "y = total0.value;"),
    reduction.ProductReduction: ("product", Phase("product_of<W>", "s.add((W)x);"), _FOUND),
    reduction.L1Reduction: ("magnitudes", Phase("sum_of<W>", "s.add(x < A(0) ? W(0) - (W)x : (W)x);"), _FOUND),
    reduction.SquareReduction: ("squares", Phase("sum_of<W>", "s.add(squared(x));"), _FOUND),
    reduction.L2Reduction: ("length", Phase("sum_of<W>", "s.add(squared(x));"), "y = sqrt((A)total0.total);"),
    ReduceLogSumExp: (
        "log_sum_exp", Phase("sum_of<W>", "s.add((W)exp(A(x - top)));"), "y = log((A)total1.total) + top;"
    ),
}  # fmt: skip
"""By what a reduction computes: the name of its kernel, what is found of each group, and the result from that."""
_FIRST = {ReduceLogSumExp: Phase("max_of<A>", "s.add(x);", "const A m = total0.value, top = m - m == A(0) ? m : A(0);")}
"""What is found of each group before that."""


@on_cuda(*registered_kinds(Reduction))
class _CudaReduction(PrefixOperator):
    """A reduction; the axes are the host operator's.

    Attributes:
        axes: which axes are reduced.
    """

    axes: ClassVar[AxesReader]

    def prepare(self) -> Step:
        """One reduction, in two launches where groups are few and long."""
        x, y = self.x(0), self.y(0)
        axes, _ = type(self).axes(self.call())
        form = next(kind for kind in type(self).__mro__ if kind in _FORMS)
        name, phase, last = _FORMS[form]
        kept = y.reshape(output_shape(x.shape, axes, True))
        if not x.size and y.size and form in (reduction.MaxReduction, reduction.MinReduction):
            least, greatest = reduction.extremes_over_nothing(self.call(), y.dtype)
            return constant_step(self, y, np.full(y.shape, least if form is reduction.MaxReduction else greatest))
        if self.inputs_checked:
            return self._of_prefixes(form, x, kept, axes)
        phases = [_FIRST[form], phase] if form in _FIRST else [phase]
        return by_groups(self, name, x.shape, axes, Groups(phases, last=last, helpers=_SQUARED), {"x": x}, {"y": kept})

    def _of_prefixes(self, form: type[Reduction], x: Array, y: Array, axes: tuple[int, ...]) -> Step:
        """A check of the lengths, and one reduction that leaves out what lies behind them."""
        name, phase, last = _FORMS[form]
        if form is reduction.MeanReduction:
            last = "y = (A)(total0.total / (W)count);"
        groups = Groups([replace(phase, absorb=f"if (r == 0 || r < count) {phase.absorb}")], last=last)
        lengths = self.x(1).reshape(y.shape)
        inputs = {"x": x, "count": lengths}
        compute = by_groups(self, f"{name}_of_prefixes", x.shape, axes, groups, inputs, {"y": y})
        return in_sequence([self.lengths_check(lengths, x.shape[axes[0]]), compute])


@on_cuda(ArgMax, ArgMin)
class _CudaArgExtreme(CudaOperator):
    """The place of an extreme."""

    def prepare(self) -> Step:
        """One reduction to a value and its place, which is counted from the end for the last of equals."""
        x, call = self.x(0), self.call()
        axis = call.axis("axis", -1, x.ndim)
        kept = self.y(0).reshape(output_shape(x.shape, (axis,), True))
        state = "argmax_of" if isinstance(self, ArgMax) else "argmin_of"
        if not call.arguments.bool("last"):
            groups = Groups([Phase(f"{state}<A>", "s.add(x, r);")], last="y = total0.place;")
            return by_groups(self, state, x.shape, (axis,), groups, {"x": x}, {"y": kept})
        groups = Groups([Phase(f"{state}<A>", "s.add(x, last_place - r);")], last="y = last_place - total0.place;")
        last_place = {"last_place": np.int64(x.shape[axis] - 1)}
        return by_groups(self, f"{state}_last", x.shape, (axis,), groups, {"x": x}, {"y": kept}, last_place)
