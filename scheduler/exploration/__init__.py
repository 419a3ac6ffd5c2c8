"""Schedule exploration: scenarios of threads, streams and tasks under schedules that a seed or a search decides.

    explore(scenario, seed)          one schedule
    explore_seeds(scenario, seeds)   many
    reduction(scenario)              all, but one of those that differ only in the order of independent steps
    systematic(scenario)             all with at most two preemptions
    schedule.replay(scenario)        one of them again

`controlled` has the threads and locks, `strategies` what decides, `device` the simulated device's part, `event_loop`
asyncio's. For a failure, `shrink` makes the net smaller, `fewest` reduces preemptions, `inevitable` finds the moment
from which it could only fail, `nondeterminism` what no schedule controls; `dagexec.analysis.story` tells the story.
"""

from dagexec.scheduler.exploration.controlled import ControlledThreads
from dagexec.scheduler.exploration.exploring import (
    Exploration,
    ExploredSchedule,
    compact,
    expand,
    explore,
    explore_all,
    explore_seeds,
    reduction,
    search_begins,
    systematic,
)
from dagexec.scheduler.exploration.strategies import (
    BoundedSearch,
    EarliestFirst,
    RandomStrategy,
    ReplayStrategy,
    Sampling,
    Strategy,
    sampling,
)

__all__ = [
    "BoundedSearch",
    "ControlledThreads",
    "EarliestFirst",
    "Exploration",
    "ExploredSchedule",
    "RandomStrategy",
    "ReplayStrategy",
    "Sampling",
    "Strategy",
    "compact",
    "expand",
    "explore",
    "explore_all",
    "explore_seeds",
    "reduction",
    "sampling",
    "search_begins",
    "systematic",
]
