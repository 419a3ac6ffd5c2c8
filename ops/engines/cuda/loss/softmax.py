"""SoftmaxWithLoss and SpatialSoftmaxWithLoss on CUDA: softmax and the losses of rows in one kernel; their gradients."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.errors import FeedError
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.engines.cuda.loss.labels import LABELS, LabeledOperator
from dagexec.ops.families.loss.labels import IGNORED
from dagexec.ops.families.loss.softmax import (
    MIN_LOG,
    ClassView,
    SoftmaxWithLoss,
    SoftmaxWithLossGradient,
    SpatialSoftmaxWithLoss,
    SpatialSoftmaxWithLossGradient,
    View,
    check_distribution,
    distribution_tolerance,
    total_dtype,
)

MAXIMUM = Phase("max_of<A>", "s.add(x);", "const A top = total0.value;")
"""Phase 0 of what normalizes exponentials: `top`, which is subtracted."""

EXPONENTIALS = Phase("sum_of<W>", "s.add((W)exp(A(x - top)));", "const A sum = (A)total1.total;")
"""Phase 1: `sum`."""

_PROBABILITIES = r"""
template <class W> struct probabilities {
    W total, all, least;
    __device__ void begin() { total = W(0); all = W(0); least = W(0); }
    __device__ void add(W term, W probability) {
        total += term;
        all += probability;
        least = nan_min(least, probability);
    }
    __device__ void join(const probabilities& other) {
        total += other.total;
        all += other.all;
        least = nan_min(least, other.least);
    }
};
"""
"""Of a row: the sum of the terms of the loss, that of the probabilities, and the least of these or 0."""


class _CudaSoftmaxLoss(LabeledOperator):
    """What the loss and its gradient share.

    Attributes:
        view: how the logits are seen.
        least: the least label; IGNORED when a row may be skipped.
    """

    view: View
    least: ClassVar[int]

    def sizes(self) -> ClassView:
        """The sizes of the logits."""
        return type(self).view(self.call())

    def labels(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """The operands of a kernel that are labels: `target`, or `label` and `fault`."""
        sizes = self.sizes()
        if self.arguments.bool("label_prob"):
            return {"target": self.x(1).reshape(sizes.shape)}, {}
        label = {"label": self.x(1).reshape(sizes.outer, 1, sizes.inner)}
        return label, {"fault": self.label_fault(1, sizes.classes, self.least)}

    def row_weight(self, index: int | None) -> tuple[dict[str, Array], str]:
        """The operand that is the weight of a row, and the weight as an expression."""
        sizes = self.sizes()
        given = {} if index is None else {"weight": self.x(index).reshape(sizes.outer, 1, sizes.inner)}
        weight = "(double)weight" if given else "1.0"
        return given, f"(label == {IGNORED} ? 0.0 : {weight})" if self.least == IGNORED else weight


@on_cuda(SoftmaxWithLoss, SpatialSoftmaxWithLoss)
class _CudaSoftmaxWithLoss(_CudaSoftmaxLoss):
    """Softmax and the cross entropy of each row; NaN for a label that is out of range.

    With label_prob, labels that are no distribution are used as they are; the run ends with the host's error.
    """

    def prepare(self) -> Step:
        """Softmax with the loss of each row, then their mean."""
        sizes = self.sizes()
        shape, rows = sizes.shape, (sizes.outer, 1, sizes.inner)
        losses, weights = (self.scratch(rows, np.float64) for _ in range(2))
        labels, fault = self.labels()
        given, weight = self.row_weight(2 if len(self.input_blobs) == 3 else None)
        scalars: dict[str, np.generic] = {}
        phases = [MAXIMUM, EXPONENTIALS]
        if "target" in labels:
            before, name = "", "distribution"
            right = "total2.least >= W(0) && fabs((double)total2.all - 1.0) <= tolerance"
            logarithm = "nan_max(A(A(x - top) - log(sum)), A(least_log))"
            phases.append(Phase("probabilities<W>", f"s.add((W)A({logarithm} * A(target)), (W)target);", size=24))
            loss = "-(double)(A)total2.total"
            scalars |= {"least_log": np.float64(MIN_LOG), "tolerance": np.float64(self._tolerance())}
            blob = self.definition.input[1]
            wrong = FeedError(f"{self.label}: the probabilities of a row of blob {blob!r} were not a distribution")
            fault = {"fault": self.fault_word(partial(self._check_distribution, self.x(1)), wrong)}
        else:
            before = (
                "const bool known = label >= 0 && label < w.length; "
                "const A own = known ? get(x_p, x_base + label * class_stride) : A(float_of(0x7fc00000u));"
            )
            name, right, loss = "label", "known", "(double)A(log(sum) - A(own - top))"
            if self.least == IGNORED:
                name, right, loss = "pixel_label", f"known || label == {IGNORED}", f"label == {IGNORED} ? 0.0 : {loss}"
            scalars["class_stride"] = np.int64(sizes.inner)
        groups = Groups(
            phases,
            before=before,
            each="y = exp(A(x - top)) / sum;",
            last=f"if (!({right})) atomicExch(fault_p, 1); "
            f"const double share = {weight}; weighted = share; loss = ({loss}) * share;",
            helpers=LABELS + _PROBABILITIES,
        )
        total = Groups(
            [Phase("two_sums<double>", "s.add(loss, weight);")],
            last="y = total0.other != 0.0 ? scale * total0.one / total0.other : 0.0;",
        )
        count = (sizes.rows,)
        return in_sequence(
            [
                by_groups(
                    self,
                    f"softmax_loss_of_{name}",
                    shape,
                    (1,),
                    groups,
                    {"x": self.x(0).reshape(shape), **labels, **given},
                    {"y": self.y(0).reshape(shape), "loss": losses, "weighted": weights, **fault},
                    scalars,
                ),
                by_groups(
                    self,
                    "mean_loss",
                    count,
                    (0,),
                    total,
                    {"loss": losses.reshape(count), "weight": weights.reshape(count)},
                    {"y": self.y(1).reshape(1)},
                    {"scale": np.float64(self.arguments.float("scale", 1.0))},
                ),
            ]
        )

    def _tolerance(self) -> float:
        return distribution_tolerance(self.x(1).dtype)

    def _check_distribution(self, given: Array) -> None:
        sizes, labels = self.sizes(), self.fetched(given)
        totals = np.empty((sizes.outer, sizes.inner), total_dtype(labels.dtype))
        check_distribution(labels, sizes, totals, self.label, self.definition.input[1])


@on_cuda(SoftmaxWithLossGradient, SpatialSoftmaxWithLossGradient)
class _CudaSoftmaxWithLossGradient(_CudaSoftmaxLoss):
    """dX = (softmax - label) * weight * scale * dloss / (sum of weights)."""

    def prepare(self) -> Step:
        """The sum of the weights, where it is not the number of rows; then one kernel."""
        sizes, inputs = self.sizes(), len(self.input_blobs)
        shape = sizes.shape
        labels, fault = self.labels()
        given, weight = self.row_weight(2 if inputs == 5 else None)
        steps: list[Step] = []
        if given or self.least == IGNORED:
            total = self.scratch((1,), np.float64)
            operands = {**given, **({"label": labels["label"]} if self.least == IGNORED else {})}
            flat = {key: array.reshape(-1) for key, array in operands.items()}
            groups = Groups([Phase("sum_of<double>", f"s.add({weight});")], last="total = total0.total;")
            steps.append(by_groups(self, "weight_sum", (sizes.rows,), (0,), groups, flat, {"total": total}))
            given["total"] = total.reshape(1, 1, 1)
            whole = "total"
        else:
            whole = "(double)w.outputs"
        p = self.x(inputs - 2).reshape(shape)
        before = f"const A factor = {whole} != 0.0 ? (A)({weight} * (scale * (double)dloss / {whole})) : A(0);"
        if "target" in labels:
            each, last = "dx = A(p - A(target)) * factor;", ""
        else:
            each, last = "dx = p * factor - (r == label ? factor : A(0));", "is_class(label, w.length, fault_p);"
            if self.least == IGNORED:
                each = f"dx = label == {IGNORED} ? A(0) : p * factor - (r == label ? factor : A(0));"
                last = f"if (label != {IGNORED}) {last}"
        steps.append(
            by_groups(
                self,
                "softmax_loss_gradient",
                shape,
                (1,),
                Groups(before=before, each=each, last=last, helpers=LABELS),
                {"p": p, **labels, **given, "dloss": self.x(inputs - 1).reshape(1, 1, 1)},
                {"dx": self.y(0).reshape(shape), **fault},
                {"scale": np.float64(self.arguments.float("scale", 1.0))},
            )
        )
        return in_sequence(steps)
