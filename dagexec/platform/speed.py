"""How fast a core of this machine computes: measured, as names and instruction sets of processors do not tell.

Only predictions ask for it. What a run computes, and in which pieces, never depends on it.
"""

from __future__ import annotations

import time
from functools import cache

import numpy as np

_SIZE, _RUNS = 64, 40  # of a product that every BLAS computes on one thread; half a millisecond for all of them
_NOMINAL = 85e9
"""FLOP/s of that product on the machine that `Cost.seconds` was fitted on."""


@cache
def arithmetic_speed() -> float:
    """How many times as much a core computes as the nominal one of `dagexec.core.schema.Cost.seconds`."""
    matrix = np.ones((_SIZE, _SIZE), np.float32)
    result = np.empty_like(matrix)
    shortest = np.inf
    with np.errstate(all="ignore"):  # some BLAS compute with what is beside a matrix
        for _ in range(_RUNS):
            start = time.perf_counter()
            np.matmul(matrix, matrix, out=result)
            shortest = min(shortest, time.perf_counter() - start)
    return float(2 * _SIZE**3 / shortest / _NOMINAL)
