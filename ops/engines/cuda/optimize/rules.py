"""The formulas of the update rules as C++, on one element: `dagexec.ops.families.optimize` has the same for the host.

In the code `g` is the gradient, `param` the parameter, `s0` and `s1` the state, `e0` and `e1` the extra outputs, `rate`
the learning rate, all of type A; `mean` is the mean of the squares of the gradient's row, for rules of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.platform.records import dataclass

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class CudaRule:
    """What a rule does to an element.

    Attributes:
        code: C++ that changes the state, and gives the step.
        takes: C++ that changes the parameter by it.
        numbers: the scalars that the code reads, by name, from the arguments and the dtype of the parameter.
        row_states: the numbers of the states that are one number a row.
        default_rate: the name of the argument that is the learning rate of an operator that is given none.
        has_settings: `rate`, `kept`, `correction` and `plain` are Adam's, computed once a run from the iteration.
    """

    code: str
    takes: str
    numbers: Callable[[Arguments, np.dtype[np.generic]], Numbers]
    row_states: tuple[int, ...] = ()
    default_rate: str = ""
    has_settings: bool = False

    @property
    def by_row(self) -> bool:
        """It reads `mean`."""
        return bool(self.row_states)


def _momentum_numbers(arguments: Arguments, _dtype: np.dtype[np.generic]) -> Numbers:
    momentum = arguments.float("momentum", 0.0)
    return {"momentum": momentum, "ahead": 1.0 + momentum, "nesterov": float(arguments.bool("nesterov"))}


MOMENTUM = CudaRule(
    "A kept = momentum * s0; s0 = rate * g + kept; e0 = nesterov != A(0) ? ahead * s0 - kept : s0;",
    "param = param - e0;",
    _momentum_numbers,
)


def _adagrad_numbers(arguments: Arguments, _dtype: np.dtype[np.generic]) -> Numbers:
    return {"epsilon": arguments.float("epsilon", 1e-5), "decay": arguments.float("decay", 1.0)}


ADAGRAD = CudaRule(
    "s0 = decay * s0 + g * g; e0 = rate / (sqrt(s0) + epsilon); e1 = e0 * g;", "param = param + e1;", _adagrad_numbers
)


def _adadelta_numbers(arguments: Arguments, _dtype: np.dtype[np.generic]) -> Numbers:
    decay = arguments.float("decay", 0.95)
    return {"epsilon": arguments.float("epsilon", 1e-5), "decay": decay, "rest": 1.0 - decay}


ADADELTA = CudaRule(
    "s0 = decay * s0 + rest * (g * g); A change = sqrt(s1 + epsilon) / sqrt(s0 + epsilon) * g; "
    "s1 = decay * s1 + rest * (change * change);",
    "param = param + change * rate;",
    _adadelta_numbers,
)


def _rms_numbers(arguments: Arguments, _dtype: np.dtype[np.generic]) -> Numbers:
    return {
        "epsilon": arguments.float("epsilon", 1e-5),
        "rest": 1.0 - arguments.float("decay", 0.9),
        "momentum": arguments.float("momentum", 0.0),
    }


RMS = CudaRule(
    "s0 = s0 + rest * (g * g - s0); s1 = momentum * s1 + rate * (g / sqrt(s0 + epsilon)); e0 = s1;", "", _rms_numbers
)


def _ftrl_numbers(arguments: Arguments, dtype: np.dtype[np.generic]) -> Numbers:
    return {
        "beta": arguments.float("beta", 1.0),
        "lambda1": arguments.float("lambda1", 0.001),
        "lambda2": arguments.float("lambda2", 0.001),
        "tiny": float(ml_dtypes.finfo(dtype).tiny),  # type: ignore[no-untyped-call]
    }


FTRL = CudaRule(
    "A before = sqrt(s0); s0 = s0 + g * g; A root = sqrt(s0); s1 = s1 + g - (root - before) / rate * param; "
    "A divisor = nan_max((root + beta) / rate + lambda2, tiny);",
    "param = (clipped(s1, -lambda1, lambda1) - s1) / divisor;",
    _ftrl_numbers,
    default_rate="alpha",
)


def _adam_numbers(arguments: Arguments, _dtype: np.dtype[np.generic]) -> Numbers:
    beta1, beta2 = arguments.float("beta1", 0.9), arguments.float("beta2", 0.999)
    epsilon = arguments.float("epsilon", 1e-5)
    return {"beta1": beta1, "beta2": beta2, "rest1": 1.0 - beta1, "rest2": 1.0 - beta2, "epsilon": epsilon}


ADAM = CudaRule(
    "s0 = beta1 * s0 + rest1 * g; s1 = beta2 * s1 + rest2 * (g * g); "
    "e0 = plain != A(0) ? s0 * correction : s0 / (sqrt(s1) + epsilon) * correction;",
    "param = kept * param + e0 * rate;",
    _adam_numbers,
    has_settings=True,
)

ROW_ADAGRAD = CudaRule(
    "s0 = s0 + mean;",
    "param = param + g * (rate / (sqrt(s0) + epsilon));",
    lambda arguments, _dtype: {"epsilon": arguments.float("epsilon", 1e-5)},
    row_states=(0,),
)

ROW_ADAM = CudaRule(
    "s1 = beta2 * s1 + rest2 * mean;",
    "s0 = beta1 * s0 + rest1 * g; e0 = s0 * (correction / (sqrt(s1) + epsilon)); param = kept * param + e0 * rate;",
    _adam_numbers,
    row_states=(1,),
    has_settings=True,
)
"""Of rules of rows, `code` is done once a row, and `takes` for each element."""

SETTINGS = ("rate", "kept", "correction", "plain")
