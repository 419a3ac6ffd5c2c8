"""Cross entropy of logits under the logistic function: SigmoidCrossEntropyWithLogits, plain and weighted.

With s(x) = ln(1 + exp(x)), which is max(x, 0) + ln(1 + exp(-|x|)) and so neither overflows nor loses its small values,
the logarithms of the likelihood of target t are

    t x - s(x)                  as it is usual
    (2 t - 1) (x - s(x))        log_D_trick: Goodfellow et al., 2014, arXiv:1406.2661, section 3
    t x - (1 - t) s(x)          unjoined_lr_loss: an example with t = 1 has come with t = 0 before

and the loss of a row is minus their mean.
"""

from __future__ import annotations

from dagexec.core.expressions import ROW_COUNT, Expression, absolute, logistic, maximum, minimum, row_mean, softplus
from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError
from dagexec.ops.base.row_operator import last_axis, row_operator

ARGUMENTS = {
    "log_D_trick": "1: (2 t - 1) (x - ln(1 + exp(x))) (default 0)",
    "unjoined_lr_loss": "1: t x - (1 - t) ln(1 + exp(x)) (default 0)",
}


def check_form(call: OperatorCall) -> None:
    """Raise ArgumentError when both forms are requested."""
    if call.arguments.bool("log_D_trick") and call.arguments.bool("unjoined_lr_loss"):
        raise ArgumentError(f"{call.label}: 'log_D_trick' and 'unjoined_lr_loss' cannot both be 1")


def _logarithm(x: Expression, t: Expression, *, log_D_trick: bool, unjoined_lr_loss: bool) -> Expression:
    tail = softplus(-absolute(x))
    if log_D_trick:
        return (minimum(x, 0) - tail) * (t * 2 - 1)
    if unjoined_lr_loss:
        return t * x + (t - 1) * (maximum(x, 0) + tail)
    return t * x - maximum(x, 0) - tail


def _slope(x: Expression, t: Expression, *, log_D_trick: bool, unjoined_lr_loss: bool) -> Expression:
    """The derivative of the logarithm by x, at 0 too, where it has no corner."""
    if log_D_trick:
        return logistic(-x) * (t * 2 - 1)
    return t + (t - 1) * logistic(x) if unjoined_lr_loss else t - logistic(x)


def _gradient(
    x: Expression,
    t: Expression,
    dz: Expression,
    *,
    log_D_trick: bool = False,
    unjoined_lr_loss: bool = False,
) -> Expression:
    return _slope(x, t, log_D_trick=log_D_trick, unjoined_lr_loss=unjoined_lr_loss) * (dz / -ROW_COUNT)


@row_operator(
    "SigmoidCrossEntropyWithLogits",
    ARGUMENTS,
    members=last_axis,
    inputs=("logits", "targets"),
    output="Z",
    gradient=("dY", "X0", "X1"),
    slope=_gradient,
    check=check_form,
)
def sigmoid_cross_entropy(
    x: Expression,
    t: Expression,
    *,
    log_D_trick: bool = False,
    unjoined_lr_loss: bool = False,
) -> Expression:
    """Minus the mean over the last axis of t ln g(x) + (1 - t) ln(1 - g(x)), g the logistic function; arguments choose
    other forms."""
    return -row_mean(_logarithm(x, t, log_D_trick=log_D_trick, unjoined_lr_loss=unjoined_lr_loss))


def _weighted_gradient(x: Expression, t: Expression, weight: Expression, dz: Expression) -> Expression:
    return _slope(x, t, log_D_trick=False, unjoined_lr_loss=False) * weight * (dz / -ROW_COUNT)


@row_operator(
    "WeightedSigmoidCrossEntropyWithLogits",
    {},
    members=last_axis,
    inputs=("logits", "targets", "weights"),
    output="Z",
    gradient=("dY", "X0", "X1", "X2"),
    slope=_weighted_gradient,
)
def weighted_sigmoid_cross_entropy(x: Expression, t: Expression, weight: Expression) -> Expression:
    """SigmoidCrossEntropyWithLogits with a weight for each element."""
    return -row_mean(_logarithm(x, t, log_D_trick=False, unjoined_lr_loss=False) * weight)
