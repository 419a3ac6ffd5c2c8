"""Portfolio: sampling strategies take turns with the seeds, as each of them is best at bugs that the others miss.

Thomson, Donaldson and Betts (TOPC 2016) and Zhao and others (ASPLOS 2025) find that none is ahead everywhere.
"""

from __future__ import annotations

from typing import Literal

from dagexec.scheduler.exploration.strategies.pct import ProbabilisticConcurrencyTesting
from dagexec.scheduler.exploration.strategies.pos import PartialOrderSampling
from dagexec.scheduler.exploration.strategies.random_walk import RandomStrategy
from dagexec.scheduler.exploration.strategies.strategy import SampledStrategy
from dagexec.scheduler.exploration.strategies.surw import SelectivelyUniformWalk

Sampling = Literal["portfolio", "surw", "pos", "pct", "random"]

_TURNS: tuple[type[SampledStrategy], ...] = (
    RandomStrategy,
    PartialOrderSampling,
    SelectivelyUniformWalk,
    ProbabilisticConcurrencyTesting,
)
_BY_NAME = {kind.name: kind for kind in _TURNS}


def sampling(name: Sampling, seed: int, *, timeouts: bool = False) -> SampledStrategy:
    """The strategy of that name for a seed; the portfolio's is one of the others. Raises ValueError for no name."""
    if name == "portfolio":
        return _TURNS[seed % len(_TURNS)](seed, timeouts=timeouts)
    if name not in _BY_NAME:
        raise ValueError(f"expected portfolio, {', '.join(_BY_NAME)} for a strategy, found {name!r}")
    return _BY_NAME[name](seed, timeouts=timeouts)
