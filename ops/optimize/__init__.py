"""Operators that optimizers are made of: the counter, learning rates, and update rules, dense and sparse."""

from dagexec.ops.optimize import (
    adam,
    adaptive,
    clipping,
    counter,
    ftrl,
    learning_rate,
    momentum,
    rate_adaption,
    row_wise,
    scatter,
    sparse,
    weighted_sum,
    yellowfin,
)

__all__ = [
    "adam",
    "adaptive",
    "clipping",
    "counter",
    "ftrl",
    "learning_rate",
    "momentum",
    "rate_adaption",
    "row_wise",
    "scatter",
    "sparse",
    "weighted_sum",
    "yellowfin",
]
