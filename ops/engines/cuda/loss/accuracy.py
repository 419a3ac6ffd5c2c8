"""Accuracy on CUDA. Hits are counted in integers, so counts are exact."""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.engines.cuda.loss.labels import LABELS, LabeledOperator
from dagexec.ops.families.loss.accuracy import Accuracy, MultiClassAccuracy

_NAN = "float_of(0x7fc00000u)"


@on_cuda(Accuracy)
class _CudaAccuracy(LabeledOperator):
    """Top-k accuracy. A row whose label is out of range counts as wrong."""

    def prepare(self) -> Step:
        """Rows that are right, and their number."""
        x, y = self.x(0), self.y(0).reshape(1)
        rows, classes = x.shape
        least = classes - self.arguments.int("top_k", 1) + 1
        hits = self.scratch((rows, 1), np.int32)
        counted = Groups(
            [Phase("sum_of<i64>", "s.add(x < own || (x == own && r >= label));")],
            before="const bool known = label >= 0 && label < w.length; "
            "const A own = known ? get(x_p, x_base + label) : A(float_of(0x7fc00000u));",
            last="hit = is_class(label, w.length, fault_p) && total0.total >= least;",
            helpers=LABELS,
        )
        inputs, outputs = (
            {"x": x, "label": self.x(1).reshape(rows, 1)},
            {"hit": hits, "fault": self.label_fault(1, classes)},
        )
        mean = f"y = w.length ? (float)((double)total0.total / (double)w.length) : {_NAN};"
        return in_sequence(
            [
                by_groups(self, "hits", x.shape, (1,), counted, inputs, outputs, {"least": np.int64(least)}),
                by_groups(
                    self,
                    "accuracy",
                    (rows,),
                    (0,),
                    Groups([Phase("sum_of<i64>", "s.add(hit);")], last=mean),
                    {"hit": hits.reshape(-1)},
                    {"y": y},
                ),
            ]
        )


@on_cuda(MultiClassAccuracy)
class _CudaMultiClassAccuracy(LabeledOperator):
    """Accuracy for each class. A label that is out of range belongs to none."""

    def prepare(self) -> Step:
        """Which rows are right; then for each class how many rows are, and how many there are."""
        x = self.x(0)
        rows, classes = x.shape
        labels = self.x(1)
        right = self.scratch((rows, 1), np.int64)
        found = Groups(
            [Phase("argmax_of<A>", "s.add(x, r);")],
            last="right = is_class(label, w.length, fault_p) && total0.place == label ? (i64)label : (i64)-1;",
            helpers=LABELS,
        )
        counted = Groups(
            [Phase("two_sums<i64>", "s.add(label == o, right == o);")],
            last="amount = total0.one; "
            "accuracy = total0.one ? (float)((double)total0.other / (double)total0.one) : 0.0f;",
        )
        return in_sequence(
            [
                by_groups(
                    self,
                    "right_rows",
                    x.shape,
                    (1,),
                    found,
                    {"x": x, "label": labels.reshape(rows, 1)},
                    {"right": right, "fault": self.label_fault(1, classes)},
                ),
                by_groups(
                    self,
                    "class_accuracy",
                    (classes, rows),
                    (1,),
                    counted,
                    {"label": labels.reshape(1, rows), "right": right.reshape(1, rows)},
                    {"accuracy": self.y(0).reshape(classes, 1), "amount": self.y(1).reshape(classes, 1)},
                ),
            ]
        )
