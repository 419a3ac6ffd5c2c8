"""The gradient of Gelu in one pass over X and dY, by a kernel of our own."""

from __future__ import annotations

from collections.abc import Callable

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Step
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.activation import gradient
from dagexec.ops.kernels import elementary
from dagexec.ops.kernels.builder import Builder, Vector
from dagexec.ops.kernels.formulas import formula_step


def _exact(build: Builder, read: Callable[[int], Vector]) -> list[Vector]:
    return [elementary.gelu_slope(build, read(1)) * read(0)]


def _fast(build: Builder, read: Callable[[int], Vector]) -> list[Vector]:
    return [elementary.tanh_gelu_slope(build, read(1)) * read(0)]


@operator(gradient.GeluGradient.schema, engine="ONEDNN")
class GeluGradient(OneDNNOperator, gradient.GeluGradient):
    """Gradient of Gelu: dX of dY and X."""

    metas = (FLOAT32,)

    def prepare_primitive(self) -> Step:
        """The formula of the exact form, or of the approximation."""
        formula = _fast if self.arguments.bool("fast_gelu") else _exact
        inputs = [self.x(0), self.x(1)]
        step = formula_step(self.onednn.machine, formula, inputs, [self.y(0)], self.label)
        if step is None:
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for these tensors")
        return step
