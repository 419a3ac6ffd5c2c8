"""Gradients of softmax by oneDNN, in one pass over Y and dY."""

from __future__ import annotations

from typing import ClassVar

from dagexec.core.operator import Step
from dagexec.core.registry import operator
from dagexec.ops.engines.onednn.descriptors import DIFF_DST, DIFF_SRC, DST, FORWARD_TRAINING
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.softmax import LOG_SOFTMAX, SOFTMAX
from dagexec.ops.families.activation import softmax_gradient
from dagexec.ops.families.activation.softmax import grouping


class NormalizationGradient(OneDNNOperator):
    """The gradient of Softmax or LogSoftmax."""

    algorithm: ClassVar[int]

    def prepare_primitive(self) -> Step:
        """One primitive along the middle axis of outer x group x inner."""
        outer, group, inner = grouping(self.call())
        shape = (outer, group) if inner == 1 else (outer, group, inner)
        y, dy, dx = self.x(0).reshape(shape), self.x(1).reshape(shape), self.y(0).reshape(shape)
        layout, attributes = self.packed(y), self.attributes()
        both = (layout, layout)
        forward = self.describe(
            "softmax_forward", self.onednn.engine, FORWARD_TRAINING, self.algorithm, *both, 1, attributes
        )
        handles = (*both, layout, 1, forward, attributes)
        found = self.describe_fast("softmax_backward", self.onednn.engine, self.algorithm, *handles)
        bound = self.in_parts(found, {DST: (layout, y), DIFF_DST: (layout, dy), DIFF_SRC: (layout, dx)}, (0, 2))
        return self.rebindable(bound.step, bound, {0: DST, 1: DIFF_DST}, {0: DIFF_SRC})


@operator(softmax_gradient.SoftmaxGradient.schema, engine="ONEDNN")
class SoftmaxGradient(NormalizationGradient, softmax_gradient.SoftmaxGradient):
    """Gradient of Softmax."""

    algorithm = SOFTMAX


@operator(softmax_gradient.LogSoftmaxGradient.schema, engine="ONEDNN")
class LogSoftmaxGradient(NormalizationGradient, softmax_gradient.LogSoftmaxGradient):
    """Gradient of LogSoftmax."""

    algorithm = LOG_SOFTMAX
