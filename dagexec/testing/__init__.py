"""What tests need of those who embed dagexec or write operators for it.

- an operator alone, and its gradient beside central differences: `run_operator`, `check_gradient`; inputs of a whole
  model: `random_feeds`;
- a device on the host whose order of work a seed decides, with planned faults: `simulated` (docs/simulated-device.md);
- accesses that nothing orders: `detecting`, and the proofs `check_net` and, for graphs of other systems, `check_graph`
  of what `read_graph` reads and `export_fx` exports (docs/hazards.md);
- threads that do in runs what the machine of runs does not allow: `conforming` (docs/exploration.md);
- threads, streams and event loops under schedules that a seed or a search decides: `explore` (docs/exploration.md);
  with pytest, `pytest --explore` (the module `dagexec_pytest`).
"""

from dagexec.analysis.comparison import random_feeds
from dagexec.analysis.foreign_graphs import export_fx, read_graph
from dagexec.analysis.story import Story, explain
from dagexec.core.stream import Kernel
from dagexec.devices.sim import (
    Driver,
    Fault,
    RandomFaults,
    SeededDriver,
    SimSettings,
    ThreadDriver,
    configure,
    simulated,
)
from dagexec.platform.threads import threads
from dagexec.scheduler.conformance import Conformance, conforming
from dagexec.scheduler.exploration import (
    EarliestFirst,
    Exploration,
    ExploredSchedule,
    RandomStrategy,
    ReplayStrategy,
    Strategy,
    explore_all,
    explore_seeds,
    reduction,
    search_begins,
    systematic,
)
from dagexec.scheduler.exploration import explore as explore_once
from dagexec.scheduler.exploration.device import ControlledDriver
from dagexec.scheduler.exploration.event_loop import ControlledEventLoop
from dagexec.scheduler.exploration.event_loop import run as run_event_loop
from dagexec.scheduler.exploration.functions import controlled
from dagexec.scheduler.exploration.shrink import shrink
from dagexec.scheduler.hazards import Detector, Proof, check_net, check_plan, detecting
from dagexec.scheduler.hazards.foreign import ByteRange, ForeignGraph, ForeignOperator, check_graph
from dagexec.testing.exploring import explore
from dagexec.testing.gradients import analytic_gradients, check_gradient
from dagexec.testing.operators import run_operator

__all__ = [
    "ByteRange",
    "Conformance",
    "ControlledDriver",
    "ControlledEventLoop",
    "Detector",
    "Driver",
    "EarliestFirst",
    "Exploration",
    "ExploredSchedule",
    "Fault",
    "ForeignGraph",
    "ForeignOperator",
    "Kernel",
    "Proof",
    "RandomFaults",
    "RandomStrategy",
    "ReplayStrategy",
    "SeededDriver",
    "SimSettings",
    "Story",
    "Strategy",
    "ThreadDriver",
    "analytic_gradients",
    "check_gradient",
    "check_graph",
    "check_net",
    "check_plan",
    "configure",
    "conforming",
    "controlled",
    "detecting",
    "explain",
    "explore",
    "explore_all",
    "explore_once",
    "explore_seeds",
    "export_fx",
    "random_feeds",
    "read_graph",
    "reduction",
    "run_event_loop",
    "run_operator",
    "search_begins",
    "shrink",
    "simulated",
    "systematic",
    "threads",
]
