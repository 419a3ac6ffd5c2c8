"""Bugs of waits: an order that a plan, a graph or a machine should have and has not."""

from __future__ import annotations

from dagexec.core.device import CPU
from dagexec.core.graph import flow_of
from dagexec.scheduler.plan.synchronization import synchronize
from dagexec.scheduler.run.drain import Drain
from dagexec.scheduler.run.launching import LaunchedChains, unguarded_chain
from dagexec.scheduler.run.machine import Machine
from tests.planted import scenes
from tests.planted.bug import Bug, Edit
from tests.planted.scenes import CROSS, SIM

FAMILY = "missing waits"

BUGS = (
    Bug(
        "no waits between streams",
        FAMILY,
        "a chain on a device waits for no chain on another stream",
        (Edit(synchronize, "waits[child].append(parent)", "pass"),),
        scenes.proved(CROSS),
        "proof",
        "must wait for the event of chain",
    ),
    Bug(
        "no record where both are on one device",
        FAMILY,
        "a chain records no event unless some chain on another device waits for it",
        (Edit(synchronize, "records[parent] = True", "records[parent] = devices[child] != devices[parent]"),),
        scenes.proved(CROSS),
        "proof",
        "never records its event",
    ),
    Bug(
        "only the first wait of a chain",
        FAMILY,
        "of several chains on other streams the last ones are not waited for",
        (Edit(unguarded_chain, "for doing in waits:", "for doing in waits[:1]:"),),
        scenes.device_runs(CROSS),
        "schedules",
        "other bytes",
        slow=True,
    ),
    Bug(
        "the host waits for one device chain",
        FAMILY,
        "a chain on the host that reads what two chains on a device compute waits for one of them",
        (Edit(LaunchedChains._host_wait, "for event in waits:", "for event in waits[:1]:"),),
        scenes.detected(((), (), (0, 1)), (SIM, SIM, CPU)),
        "detector",
        "RAW on blob",
    ),
    Bug(
        "readers do not hold up a writer",
        FAMILY,
        "the graph has no edge from who reads a blob to who overwrites it",
        (Edit(flow_of, "waits_for.update(row)", "pass"),),
        scenes.overwriting,
        "proof",
        "WAR",
    ),
    Bug(
        "a child after its first parent",
        FAMILY,
        "a task begins when one of those that it waits for is done",
        (
            Edit(
                Machine.end,
                "if not self._left[child] and",
                "if self._left[child] + 1 == self._graph.parent_counts[child] and",
            ),
        ),
        scenes.all_states(scenes.tasks([1, 1, 1, 1], [[1, 2], [3], [3], []])),
        "machine",
        "have a piece to take, but it says",
    ),
    Bug(
        "a child after the first piece",
        FAMILY,
        "what waits for a task of several pieces begins when one of them is done",
        (Edit(Machine.end, "if self._done[task] < self._graph.pieces[task]:", "if self._done[task] != 1:"),),
        scenes.all_states(scenes.tasks([2, 1], [[1], []])),
        "machine",
        "tasks are left, but it says",
    ),
    Bug(
        "a run that ends before its streams",
        FAMILY,
        "the owner of a run on a device is told when all is launched, and not when all is done",
        (Edit(Drain._start, "else self._streams.all()", "else []"),),
        scenes.device_runs(((), (0,))),
        "schedules",
        "other bytes",
        modeled_on="microsoft/onnxruntime#18026: models split between two providers went wrong with several "
        "threads, as nobody waited for the stream after the work had been put on it",
        slow=True,
    ),
)
