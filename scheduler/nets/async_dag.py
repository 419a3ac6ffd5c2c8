"""AsyncDAGNet: chains launched on a device stream per worker, with events where an edge crosses streams or devices.

A worker launches a chain as soon as its parents have been launched, and goes on; waiting for their results happens on
the device. Host chains run as in DAGNet, once the events of their device parents are done. The run is over when every
stream is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from dagexec.platform.lazy import LazyModule
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.run.launching import stream_group

if not TYPE_CHECKING:
    synchronizations = LazyModule("dagexec.scheduler.plan.synchronization")
else:
    from dagexec.scheduler.plan import synchronization as synchronizations
    from dagexec.scheduler.plan.synchronization import Synchronization


class AsyncDAGNet(DAGNet):
    """Launches chains asynchronously and waits for the ends of the streams."""

    net_type: ClassVar[str] = "async_dag"
    finishes_chains: ClassVar[bool] = False

    def synchronization(self, plan: Plan) -> Synchronization:
        """An event at the end of every chain on a device that a chain elsewhere may have to wait for."""
        return synchronizations.synchronize(plan, self.guards(), self.streams_of_a_device())

    def streams_of_a_device(self) -> int | None:
        """The number of streams of each device; None where groups of operators have more of their own."""
        if any(map(stream_group, self.operators)):
            return None
        return self.num_workers * self.streams.per_worker
