"""Celu, the operator that docs/adding-an-operator.md adds."""

from __future__ import annotations

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import TypeMeta
from dagexec.core.expressions import Expression, expm1, select
from dagexec.core.onnx_name import OnnxName
from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError
from dagexec.ops.base.elementwise_operator import elementwise_operator


def above_zero(call: OperatorCall) -> None:
    """Raise ArgumentError unless alpha is above 0."""
    if call.arguments.float("alpha", 1.0) <= 0:
        raise ArgumentError(f"{call.label}: argument 'alpha' must be above 0")


def as_post_ops(arguments: Arguments, _meta: TypeMeta, _count: int) -> list[str]:
    """Elu of X / alpha, times alpha."""
    alpha = arguments.float("alpha", 1.0)
    return ["elu:1.0"] if alpha == 1 else [f"linear:{1 / alpha!r}:0.0", "elu:1.0", f"linear:{alpha!r}:0.0"]


@elementwise_operator(
    "Celu",
    {"alpha": "where the exponential begins, above 0 (default 1)"},
    gradient=("Y", "dY"),
    check=above_zero,
    onnx=OnnxName("Celu", 28, {"alpha": "alpha"}),
    post_ops=as_post_ops,
    narrows=True,
)
def celu(x: Expression, *, alpha: float = 1.0) -> Expression:
    """Y = X where X > 0, else alpha * (exp(X / alpha) - 1). Barron, 2017, arXiv:1704.07483."""
    return select(x > 0, x, expm1(x / alpha) * alpha)
