"""Normalize and NormalizeL1 on CUDA, and the gradient of the first: lengths and quotients in one kernel."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.families.normalization.unit_norm import Normalize, NormalizeGradient, NormalizeL1, vectors_view

_LENGTH = Phase("sum_of<W>", "s.add((W)A(x * x));", "const A length = nan_max(sqrt((A)total0.total), A(1e-12));")
_ALONG = Phase("sum_of<W>", "s.add((W)A(dy * A(x / length)));", "const A along = (A)total1.total;")
_SIZE = Phase(
    "sum_of<W>",
    "s.add((W)magnitude(x));",
    "const A size = (A)total0.total == A(0) ? A(1) : (A)total0.total;",
)


@on_cuda(Normalize, NormalizeL1, NormalizeGradient)
class _CudaVectors(CudaOperator):
    """Vectors along an axis, divided by their length."""

    def prepare(self) -> Step:
        view = vectors_view(self.call())
        inputs = {"x": self.x(0).reshape(view)}
        if isinstance(self, NormalizeGradient):
            inputs["dy"] = self.x(1).reshape(view)
            name = "normalize_gradient"
            groups = Groups([_LENGTH, _ALONG], each="y = A(dy - A(x / length) * along) / length;")
        elif isinstance(self, NormalizeL1):
            name, groups = "normalize_l1", Groups([_SIZE], each="y = x / size;")
        else:
            name, groups = "normalize", Groups([_LENGTH], each="y = x / length;")
        return by_groups(self, name, view, (1,), groups, inputs, {"y": self.y(0).reshape(view)})
