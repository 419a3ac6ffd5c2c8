"""Functions of single elements as machine code for AVX2 with FMA.

The exact GELU is max(x, 0) - |x|/2 * erfc(|x|/sqrt(2)), with erfc(m) = exp(-m q(m)) and the polynomial q of
`ops/base/error_function.py`, as NumPy's engine has it (Hendrycks and Gimpel 2016, arXiv:1606.08415). The power is
2^n 2^f with whole n and |f| <= 1/2: n goes to the exponent's bits, 2^f is a polynomial. Of 64 x 1536 numbers it takes
60 us on one core of an AMD EPYC (Zen 4), NumPy's engine 400.

An element's bytes do not depend on where it is, nor on the threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step
from dagexec.ops.base.error_function import LIMIT, log_erfc_coefficients
from dagexec.ops.kernels.assembler import (
    ADD_INTEGERS,
    FMA,
    HORNER,
    LOAD_MASKED,
    MAX,
    MIN,
    MUL,
    RAX,
    RCX,
    RDI,
    RDX,
    RSI,
    SUB,
    SUBTRACT_PRODUCT,
    Assembler,
)
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.machine_code import executable
from dagexec.ops.kernels.native import declare_remade
from dagexec.ops.kernels.team import team_step

Array = npt.NDArray[np.float32]

GELU = "gelu_erf"
"""The post-op that there is a kernel for."""

LANES = 8
_VECTOR = 4 * LANES  # bytes
_TOGETHER = 3  # vectors whose computations are mixed, as each instruction waits for the one before it
_ZERO, _LIMIT, _MASK = 12, 13, 14
_ROOT = math.sqrt(0.5)
_POWER_DEGREE = 5

_MASKS = np.repeat(np.array([-1, 0], np.int32), LANES)
"""From element LANES - n on, a mask of n elements."""


def gelu_step(machine: Machine, threads: int, x: Array, y: Array, label: str) -> Step | None:
    """The step that leaves the exact GELU of float32 `x` in `y`, which may be `x`; both are packed.

    None where the kernels cannot run, or the arrays are not of that kind.
    """
    if not machine.can_run or not all(_is_plain(array) for array in (x, y)):
        return None
    kernels = _gelu(_TOGETHER, False), _gelu(1, False), _gelu(1, True)
    if None in kernels:
        return None

    def make(x: Array, y: Array, label: str) -> Step:
        return _on(kernels, machine, threads, x, y, label)

    step = make(x, y, label)
    declare_remade(step, make, (x, y))
    return step


def _on(kernels: Sequence[int | None], machine: Machine, threads: int, x: Array, y: Array, label: str) -> Step:
    """The step of kernels for many vectors at once, one at a time, and less than one."""
    source, target = x.ctypes.data, y.ctypes.data

    def calls(start: int, stop: int) -> list[tuple[int, int, int, int, int]]:
        """Those for the elements from `start` on, which is a multiple of LANES, to `stop`."""
        found = []
        for kernel, step in zip(kernels, (_TOGETHER * LANES, LANES, 1), strict=True):
            assert kernel is not None
            count = (stop - start) // step * step
            if count:
                masks = _MASKS[LANES - count % LANES :].ctypes.data
                found.append((kernel, source + 4 * start, target + 4 * start, 4 * count, masks))
            start += count
        return found

    ends = [x.size * number // threads // LANES * LANES for number in range(threads)] + [x.size]
    tables = [calls(start, stop) for start, stop in pairwise(ends)]
    return team_step(machine.team, threads, tables, (x, y), label)


def _is_plain(array: Array) -> bool:
    return array.dtype == np.float32 and array.flags.c_contiguous and array.size > 0


@lru_cache
def _gelu(vectors: int, is_masked: bool) -> int | None:
    """The address of a function of x, y, bytes and a mask: for so many vectors at once, or for one with a mask."""
    code = Assembler()
    code.clear(RAX)
    code.load_constant(_ZERO, 0.0)
    code.load_constant(_LIMIT, LIMIT)
    if is_masked:
        code.load(_MASK, RCX, RAX)
    loop = code.here()
    load = partial(code.compute_memory, LOAD_MASKED) if is_masked else None

    def read(vector: int, number: int) -> None:
        if load is not None:
            load(vector, _MASK, RDI, RAX)
        else:
            code.load(vector, RDI, RAX, number * _VECTOR)

    chains = [tuple(range(4 * number, 4 * number + 4)) for number in range(vectors)]
    highest, *rest = (-value / math.log(2) for value in log_erfc_coefficients(np.dtype(np.float32)))
    power_highest, *power_rest = _powers_of_two()
    for number, (m, t, _, _) in enumerate(chains):
        read(m, number)
        code.compute(SUB, t, _ZERO, m)
        code.compute(MAX, m, t, m)
    for m, t, p, _ in chains:
        code.compute_constant(MUL, m, m, _ROOT)
        code.compute(MIN, m, _LIMIT, m)  # on the right: what is no number stays none
        code.load_constant(t, -1.0)
        code.compute_constant(FMA, t, m, 2 / LIMIT)
        code.load_constant(p, highest)
    for value in rest:
        for _, t, p, _ in chains:
            code.compute_constant(HORNER, p, t, value)
    for m, t, p, e in chains:
        code.compute(MUL, p, p, m)
        code.round(t, p)
        code.compute(SUB, p, p, t)
        code.load_constant(e, power_highest)
    for value in power_rest:
        for _, _, p, e in chains:
            code.compute_constant(HORNER, e, p, value)
    for number, (m, t, p, e) in enumerate(chains):
        code.powers_of_two(t)
        code.compute(ADD_INTEGERS, e, e, t)
        code.compute(MUL, e, e, m)
        read(p, number)
        code.compute(MAX, p, _ZERO, p)
        code.compute_constant(SUBTRACT_PRODUCT, p, e, _ROOT)
        if is_masked:
            code.store_masked(p, _MASK, RSI, RAX)
        else:
            code.store(p, RSI, RAX, number * _VECTOR)
    code.add_number(RAX, _VECTOR * vectors)
    code.compare(RAX, RDX)
    code.jump_if_below(loop)
    code.leave()
    return executable(code.code())


def _powers_of_two() -> list[float]:
    """Coefficients of 2^f for |f| <= 1/2, highest power first: the Chebyshev interpolant. Relative error 8e-8."""
    nodes = np.polynomial.chebyshev.chebpts1(_POWER_DEGREE + 1)
    series = np.polynomial.Chebyshev.fit(nodes / 2, np.exp2(nodes / 2), _POWER_DEGREE, [-0.5, 0.5])
    return [float(value) for value in series.convert(kind=np.polynomial.Polynomial).coef[::-1]]
