"""What N replicas give under a load: a simulation by discrete events, from times that were measured.

`Cluster` describes the machines, `Poisson`, `ClosedLoop` or `Trace` the load, `simulate` returns an `Outcome`. It uses
the routers of a real deployment. `docs/scale-out.md` says how well its predictions agree with measurements.
"""

from dagexec.cluster.simulation.cluster import Cluster, Failures
from dagexec.cluster.simulation.loads import ClosedLoop, Load, Poisson, Trace
from dagexec.cluster.simulation.outcome import Outcome
from dagexec.cluster.simulation.simulator import simulate
from dagexec.cluster.simulation.times import Constant, Empirical, Exponential, Times

__all__ = [
    "ClosedLoop",
    "Cluster",
    "Constant",
    "Empirical",
    "Exponential",
    "Failures",
    "Load",
    "Outcome",
    "Poisson",
    "Times",
    "Trace",
    "simulate",
]
