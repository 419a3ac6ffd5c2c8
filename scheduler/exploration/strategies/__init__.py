"""Strategies: who continues at a decision point of a controlled schedule; one a file."""

from dagexec.scheduler.exploration.strategies.bounded import BoundedSearch
from dagexec.scheduler.exploration.strategies.earliest import EarliestFirst
from dagexec.scheduler.exploration.strategies.random_walk import RandomStrategy
from dagexec.scheduler.exploration.strategies.replay import ReplayStrategy
from dagexec.scheduler.exploration.strategies.strategy import Candidate, Strategy

__all__ = ["BoundedSearch", "Candidate", "EarliestFirst", "RandomStrategy", "ReplayStrategy", "Strategy"]
