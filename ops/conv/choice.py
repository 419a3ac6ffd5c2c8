"""Which algorithm computes a convolution: the one its engine names, the fastest one measured, or the default.

The default depends on the geometry alone. An algorithm that cannot compute a problem is skipped, and the log says
why.
"""

from __future__ import annotations

import logging

from dagexec.errors import ResourceError
from dagexec.ops.conv.depthwise import DEPTHWISE
from dagexec.ops.conv.direct import DIRECT
from dagexec.ops.conv.fft import FFT
from dagexec.ops.conv.im2col import IM2COL
from dagexec.ops.conv.one_by_one import ONE_BY_ONE
from dagexec.ops.conv.problem import Algorithm, ConvProblem
from dagexec.ops.conv.winograd import WINOGRAD

logger = logging.getLogger("dagexec")

ENGINES = {algorithm.name: algorithm for algorithm in (WINOGRAD, FFT, DIRECT)}
"""The algorithms that an engine name asks for."""


def default_algorithm(problem: ConvProblem, label: str) -> Algorithm:
    """A matrix product if that is all there is to it, sums of shifted images for depthwise, or else im2col.

    Where a single window is too much for im2col (far dilations, or a small limit), taps are summed one after the other.
    Raises ResourceError when that takes more than the workspace limit too.
    """
    for algorithm in (ONE_BY_ONE, DEPTHWISE, IM2COL):
        why = algorithm.refusal(problem)
        if not why:
            return algorithm
    other = DIRECT.refusal(problem)
    if other:
        raise ResourceError(f"{label}: {why}; without columns: {other}")
    logger.info("%s: %s; the taps are summed one after another (DIRECT)", label, why)
    return DIRECT


def require_columns(problem: ConvProblem, label: str) -> None:
    """Raise ResourceError unless im2col keeps to the workspace limit."""
    why = IM2COL.refusal(problem)
    if why:
        raise ResourceError(f"{label}: {why}")


def named_algorithm(problem: ConvProblem, engine: str, label: str) -> Algorithm:
    """The algorithm of an engine, or the default one where that does not apply."""
    if engine:
        why = ENGINES[engine].refusal(problem)
        if not why:
            return ENGINES[engine]
        pass_over(engine, why, label)
    return default_algorithm(problem, label)


def pass_over(engine: str, why: str, label: str) -> None:
    """Log why an engine, if there is one, does not compute what the operator `label` asks it for."""
    if engine:
        logger.info("%s: engine %s skipped: %s", label, engine, why)
