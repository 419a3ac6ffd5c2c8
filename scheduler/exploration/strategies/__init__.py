"""Strategies: who continues at a decision point of a controlled schedule; one a file."""

from dagexec.scheduler.exploration.strategies.bounded import BoundedSearch
from dagexec.scheduler.exploration.strategies.earliest import EarliestFirst
from dagexec.scheduler.exploration.strategies.pct import ProbabilisticConcurrencyTesting
from dagexec.scheduler.exploration.strategies.portfolio import Sampling, sampling
from dagexec.scheduler.exploration.strategies.pos import PartialOrderSampling
from dagexec.scheduler.exploration.strategies.random_walk import RandomStrategy
from dagexec.scheduler.exploration.strategies.replay import ReplayStrategy
from dagexec.scheduler.exploration.strategies.strategy import Candidate, Strategy
from dagexec.scheduler.exploration.strategies.surw import SelectivelyUniformWalk

__all__ = [
    "BoundedSearch",
    "Candidate",
    "EarliestFirst",
    "PartialOrderSampling",
    "ProbabilisticConcurrencyTesting",
    "RandomStrategy",
    "ReplayStrategy",
    "Sampling",
    "SelectivelyUniformWalk",
    "Strategy",
    "sampling",
]
