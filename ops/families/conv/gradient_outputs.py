"""Which gradients a gradient operator of the convolution family gives, and in which order.

The inputs are X, filter and dY. Without the argument `wanted` the outputs are Caffe2's: dfilter, dbias and, when there
is one more output, dX; with no_bias=1 there is no dbias. `wanted` names the outputs in order, so that a net may ask for
any of them alone; nothing is computed for the others.
"""

from __future__ import annotations

from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError

FILTER, BIAS, INPUT = "filter", "bias", "input"

GROUP_ARGS = {
    "group": "groups that input channels and filters are divided into (default 1)",
    "no_bias": "1: its gradient has no output for a bias (default 0)",
}
"""Help texts of arguments of the layers whose gradients these are."""

GRADIENT_ARGS = {
    "no_bias": "1: there is no bias, and no gradient of it (default 0)",
    "wanted": "which gradients the outputs are, in order: strings out of filter, bias and input (default: filter, bias "
    "without no_bias, and input if there is an output left)",
}
"""Help texts of the arguments read here."""

_NAMES = (FILTER, BIAS, INPUT)


def wanted_gradients(call: OperatorCall, names: tuple[str, str, str] = _NAMES) -> tuple[str, ...]:
    """What each output of the operator is the gradient of: FILTER, BIAS or INPUT, one entry an output.

    `names` are what the operator calls these three. Raises ArgumentError when `wanted` has a name that is none of them,
    or one twice, or names the bias beside no_bias=1, and when the number of outputs is another than that of the
    gradients.
    """
    no_bias, count = call.arguments.bool("no_bias"), len(call.definition.output)
    if "wanted" not in call.arguments:
        return _default(call, names, count)
    wanted = tuple(call.arguments.strings("wanted"))
    for name in wanted:
        if name not in names:
            raise ArgumentError(f"{call.label}: argument 'wanted' must only contain {', '.join(names)}; found {name!r}")
        if wanted.count(name) > 1:
            raise ArgumentError(f"{call.label}: argument 'wanted' names {name!r} {wanted.count(name)} times")
    if no_bias and BIAS in wanted:
        raise ArgumentError(f"{call.label}: argument 'wanted' names 'bias', but there is none with no_bias=1")
    if len(wanted) != count:
        raise ArgumentError(
            f"{call.label}: argument 'wanted' must name one gradient for each of {count} output(s), "
            f"found {list(wanted)}"
        )
    return wanted


def _default(call: OperatorCall, names: tuple[str, str, str], count: int) -> tuple[str, ...]:
    """Caffe2's order; only the gradient of the input may be left out."""
    no_bias = call.arguments.bool("no_bias")
    every = tuple(name for name in names if not (no_bias and name == BIAS))
    if count not in (len(every) - 1, len(every)):
        raise ArgumentError(
            f"{call.label}: with no_bias={int(no_bias)} the outputs are the gradients of {', '.join(every)}, "
            f"of which the last is optional; found {count} output(s) (select others with argument 'wanted')"
        )
    return every[:count]
