"""Which algorithm computes a convolution: the one its engine names, the fastest one measured, or the default.

The default depends on the geometry alone. An algorithm that cannot compute a problem is passed over, and the log says
why.
"""

from __future__ import annotations

import logging

from dagexec.core.errors import ResourceError
from dagexec.ops.conv.depthwise import DEPTHWISE
from dagexec.ops.conv.im2col import IM2COL
from dagexec.ops.conv.one_by_one import ONE_BY_ONE
from dagexec.ops.conv.problem import Algorithm, ConvProblem

logger = logging.getLogger("dagexec")

ENGINES: dict[str, Algorithm] = {}
"""The algorithms that an engine name asks for."""


def default_algorithm(problem: ConvProblem, label: str) -> Algorithm:
    """A matrix product if that is all there is to it, sums over taps for depthwise, im2col, or else sums over taps.

    Raises ResourceError when no algorithm stays within the workspace limit.
    """
    for algorithm in (ONE_BY_ONE, DEPTHWISE):
        if not algorithm.refusal(problem):
            return algorithm
    refusals = []
    for algorithm in (IM2COL, *ENGINES.values()):
        why = algorithm.refusal(problem)
        if not why:
            return algorithm
        logger.info("%s: engine %s passed over: %s", label, algorithm.name, why)
        refusals.append(f"{algorithm.name}: {why}")
    raise ResourceError(f"{label}: every algorithm refuses: {'; '.join(refusals)}")


def named_algorithm(problem: ConvProblem, engine: str, label: str) -> Algorithm:
    """The algorithm of an engine, or the default one where that does not apply."""
    if engine:
        why = ENGINES[engine].refusal(problem)
        if not why:
            return ENGINES[engine]
        logger.info("%s: engine %s passed over: %s", label, engine, why)
    return default_algorithm(problem, label)
