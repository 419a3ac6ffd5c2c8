"""Cross entropy with a class a row on CUDA, and MakeTwoClass, with their gradients."""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.base.row_reduction import Groups, by_groups
from dagexec.ops.engines.cuda.loss.labels import LABELS, LabeledOperator
from dagexec.ops.families.loss.cross_entropy import (
    LabelCrossEntropy,
    LabelCrossEntropyGradient,
    MakeTwoClass,
    MakeTwoClassGradient,
)

_NAN = "A(float_of(0x7fc00000u))"


@on_cuda(LabelCrossEntropy)
class _CudaLabelCrossEntropy(LabeledOperator):
    """Minus the logarithm of the probability of the label; NaN for a label that is out of range."""

    def prepare(self) -> Step:
        y = self.y(0).reshape(-1, 1)
        rows = y.shape[0]
        x = self.x(0).reshape(rows, -1) if rows else self.x(0)
        classes = x.shape[1] if rows else 0
        found = f"is_class(label, classes, fault_p) ? -log(nan_max(get(x_p, x_base + label), A(1e-20))) : {_NAN}"
        return by_groups(
            self,
            "label_cross_entropy",
            (rows, 1),
            (1,),
            Groups(last=f"y = {found};", helpers=LABELS),
            {"x": x[:, :1] if rows else y, "label": self.x(1).reshape(rows, 1)},
            {"y": y, "fault": self.label_fault(1, classes)},
            {"classes": np.int64(classes)},
        )


@on_cuda(LabelCrossEntropyGradient)
class _CudaLabelCrossEntropyGradient(LabeledOperator):
    """The gradient of LabelCrossEntropy; 0 for a label that is out of range."""

    def prepare(self) -> Step:
        """One kernel, which reads X at the labels alone."""
        rows = self.x(2).size
        x = self.x(0).reshape(rows, -1) if rows else self.x(0)
        classes = x.shape[1] if rows else 0
        return by_groups(
            self,
            "label_cross_entropy_gradient",
            (rows, classes),
            (1,),
            Groups(
                each="dx = r == label ? -(dy / nan_max(get(x_p, x_at), A(1e-20))) : A(0);",
                last="is_class(label, classes, fault_p);",
                helpers=LABELS,
            ),
            {"x": x.reshape(rows, classes), "label": self.x(1).reshape(rows, 1), "dy": self.x(2).reshape(rows, 1)},
            {"dx": self.y(0).reshape(rows, classes), "fault": self.label_fault(1, classes)},
            {"classes": np.int64(classes)},
        )


@on_cuda(MakeTwoClass)
class _CudaMakeTwoClass(CudaOperator):
    """Probabilities of two classes."""

    def prepare(self) -> Step:
        x, y = self.x(0).reshape(-1), self.y(0).reshape(-1, 2)
        outputs = {"no": y[:, 0], "yes": y[:, 1]}
        return elementwise(self, "two_class", {"x": x}, outputs, "no = A(1) - x; yes = x;")


@on_cuda(MakeTwoClassGradient)
class _CudaMakeTwoClassGradient(CudaOperator):
    """The gradient of MakeTwoClass."""

    def prepare(self) -> Step:
        dy = self.x(0).reshape(-1, 2)
        inputs = {"no": dy[:, 0], "yes": dy[:, 1]}
        return elementwise(self, "two_class_gradient", inputs, {"dx": self.y(0).reshape(-1)}, "dx = yes - no;")
