"""Which algorithm computes a convolution: the one its engine names, the fastest one measured, or the default.

The default depends on the geometry alone. An algorithm that cannot compute a problem is skipped, and the log says
why.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dagexec.errors import ResourceError
from dagexec.ops.families.conv.problem import Algorithm, ConvProblem
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    depthwise = LazyModule("dagexec.ops.families.conv.depthwise")
    direct = LazyModule("dagexec.ops.families.conv.direct")
    fft = LazyModule("dagexec.ops.families.conv.fft")
    im2col = LazyModule("dagexec.ops.families.conv.im2col")
    one_by_one = LazyModule("dagexec.ops.families.conv.one_by_one")
    winograd = LazyModule("dagexec.ops.families.conv.winograd")
else:
    from dagexec.ops.families.conv import depthwise, direct, fft, im2col, one_by_one, winograd


logger = logging.getLogger("dagexec")

ENGINES = ("WINOGRAD", "FFT", "DIRECT")
"""The engines that are algorithms."""


def algorithm_of(engine: str) -> Algorithm:
    """The algorithm that an engine, one of ENGINES, names."""
    return {"WINOGRAD": lambda: winograd.WINOGRAD, "FFT": lambda: fft.FFT, "DIRECT": lambda: direct.DIRECT}[engine]()


def default_algorithm(problem: ConvProblem, label: str) -> Algorithm:
    """A matrix product if that is all there is to it, sums of shifted images for depthwise, or else im2col.

    Where a single window is too much for im2col (far dilations, or a small limit), taps are summed one after the other.
    Raises ResourceError when that takes more than the workspace limit too.
    """
    for algorithm in (one_by_one.ONE_BY_ONE, depthwise.DEPTHWISE, im2col.IM2COL):
        why = algorithm.refusal(problem)
        if not why:
            return algorithm
    other = direct.DIRECT.refusal(problem)
    if other:
        raise ResourceError(f"{label}: {why}; without columns: {other}")
    logger.info("%s: %s; the taps are summed one after another (DIRECT)", label, why)
    return direct.DIRECT


def require_columns(problem: ConvProblem, label: str) -> None:
    """Raise ResourceError unless im2col keeps to the workspace limit."""
    why = im2col.IM2COL.refusal(problem)
    if why:
        raise ResourceError(f"{label}: {why}")


def named_algorithm(problem: ConvProblem, engine: str, label: str) -> Algorithm:
    """The algorithm of an engine, or the default one where that does not apply."""
    if engine:
        algorithm = algorithm_of(engine)
        why = algorithm.refusal(problem)
        if not why:
            return algorithm
        pass_over(engine, why, label)
    return default_algorithm(problem, label)


def pass_over(engine: str, why: str, label: str) -> None:
    """Log why an engine, if there is one, does not compute what the operator `label` asks it for."""
    if engine:
        logger.info("%s: engine %s skipped: %s", label, engine, why)
