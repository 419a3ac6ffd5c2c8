"""AsyncDAGNet: chains launched on a device stream per worker, with events where an edge crosses streams or devices.

On the host a chain's work is done when its last step returns, and the pool starts a chain only after its parents; so no
edge between host chains needs an event. What is left of the asynchronous protocol is its end: the tail of every
chain that nobody depends on records an event, and the run is over when the host has found all of those finished.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from dagexec.core.errors import DagexecError
from dagexec.core.event import HostEvent
from dagexec.scheduler.dag import DAGNet
from dagexec.scheduler.preparation import Preparation
from dagexec.scheduler.run import ChainSteps, Run
from dagexec.scheduler.trace import Trace


class AsyncDAGNet(DAGNet):
    """Launches chains asynchronously and waits for the events of the terminal ones."""

    net_type: ClassVar[str] = "async_dag"

    def new_run(self, finished: Callable[[], object], trace: Trace | None = None) -> Run:
        """A run whose terminal chains record an event; `finished` is called after the host has seen them all."""
        preparation = self.prepared()
        steps, events = self._recorded_steps(preparation, trace)

        def settle() -> None:
            if run.error is None:
                try:
                    for event in events:
                        event.finish()
                except DagexecError as error:
                    run.error = error
            finished()

        run = self._make_run(preparation, steps, settle)
        return run

    def _recorded_steps(self, preparation: Preparation, trace: Trace | None) -> tuple[ChainSteps, list[HostEvent]]:
        if trace is not None:
            return _with_events(preparation, preparation.wrapped(trace.wrap))
        if self._recorded is None or self._recorded[0] is not preparation:
            self._recorded = (preparation, *_with_events(preparation, preparation.chain_steps))
        _, steps, events = self._recorded
        for event in events:
            event.reset()
        return steps, events

    _recorded: tuple[Preparation, ChainSteps, list[HostEvent]] | None = None


def _with_events(preparation: Preparation, steps: ChainSteps) -> tuple[ChainSteps, list[HostEvent]]:
    """The steps of every chain, with the recording of an event after the terminal ones; and those events."""
    recorded = list(steps)
    events = []
    for chain, children in enumerate(preparation.plan.children):
        if not children:
            event = HostEvent(f"chain {chain} of net {preparation.plan.graph.name!r}")
            events.append(event)
            recorded[chain] = (*steps[chain], event.record)
    return recorded, events
