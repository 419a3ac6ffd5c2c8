"""CapturedNet: an AsyncDAGNet whose runs are captured once, all streams and events, and replayed by one launch.

The first run for each shape is an ordinary one, in which things are made at their first use, such as library plans and
workspaces. The second is captured, and from then on each run copies the inputs in, replays, and copies results out. A
capture belongs to a preparation, so it is made again for other shapes and when blobs have other memory, and is dropped
with it. An observed run is not replayed, since what happens inside a replay cannot be observed.

A capture needs: one device, no work of the host, shapes that do not depend on values, and no numbers drawn on the host,
which a replay would repeat.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from dagexec.core.device import CPU, Device
from dagexec.core.exclusive import StreamMutex
from dagexec.core.graph import Graph
from dagexec.core.operator import Operator
from dagexec.core.registry import schema_of
from dagexec.core.runtime import Array, runtime_of
from dagexec.core.stream import Event, Kernel, Priority, Stream
from dagexec.core.traits import Crossing
from dagexec.errors import DeviceError, OperatorError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.observe.observers import Observer
from dagexec.scheduler.plan.dynamic import dynamic_operators
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.plan.preparation import Preparation
from dagexec.scheduler.plan.synchronization import synchronize
from dagexec.scheduler.plan.task_graph import chain_tasks
from dagexec.scheduler.run.drain import Drain
from dagexec.scheduler.run.inline import run_inline
from dagexec.scheduler.run.launching import DeviceStreams, Launch, LaunchedChains, NetStreams, kernels_of
from dagexec.scheduler.run.machine import in_order
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.work import SingleChain, chain_work

MAX_STREAMS = 16
"""The most streams of a capture: further branches are put after others."""

_GROUP = "capture"


class CapturedNet(AsyncDAGNet):
    """Replays what it has captured."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As AsyncDAGNet. Raises DeviceError, naming the operator, for a net that cannot be captured."""
        super().__init__(*arguments, **options)
        try:
            self._device = captured_device(self.graph, self.operators, self._constants)
        except DeviceError:
            self.close()
            raise
        self._outside = copies_outside(self.graph, self.operators)
        self._ran: WeakSet[Preparation] = WeakSet()
        self._captures: WeakKeyDictionary[Preparation, CapturedRun] = WeakKeyDictionary()
        self._capture_streams: CaptureStreams | None = None

    def new_run(self, finished: Callable[[], object], trace: Observer | None = None) -> Run:
        """A run that replays; an ordinary one for an observer, and for shapes that come for the first time."""
        preparation = self.prepared()
        if trace is not None or self._environment is not None or preparation not in self._ran:

            def ended() -> None:
                if run.error is None:
                    self._ran.add(preparation)
                finished()

            run = super().new_run(ended, trace)
            return run
        replay = partial(self._replay, preparation)
        work = chain_work(SingleChain(), [(replay,)])
        run = Run(self.name, work, lambda _chain, _step: f"net {self.name!r}, captured", finished)
        last = self._streams_for(preparation.plan).all()[0]
        Drain(run, self.streams, self.operators, partial(self._call_end, run), last, self.checked)
        return run

    def _replay(self, preparation: Preparation) -> None:
        captured = self._captures.get(preparation)
        if captured is None:
            captured = self._captures[preparation] = self._capture(preparation)
        captured.launch()

    def _capture(self, preparation: Preparation) -> CapturedRun:
        streams = self._streams_for(preparation.plan)
        try:
            return CapturedRun(self.name, self.operators, preparation, self._outside, streams, self.guards())
        except Exception as error:
            operator = error.operator if isinstance(error, OperatorError) else ""
            raise OperatorError(
                f"net {self.name!r} cannot be captured: {error}; compile it without capture",
                net=self.name, operator=operator, worker=threading.current_thread().name,
            ) from error  # fmt: skip

    def _streams_for(self, plan: Plan) -> CaptureStreams:
        """The streams of all captures of this net, leased once."""
        if self._capture_streams is None:
            streams = CaptureStreams(self._device, min(_width(plan), MAX_STREAMS), self.streams.stream_priority)
            self.streams.hold(self._device, _GROUP, streams)
            self._capture_streams = streams
        return self._capture_streams

    def _forget_preparations(self) -> None:
        """Drop the captures as well."""
        super()._forget_preparations()
        self._ran.clear()
        self._captures.clear()


def captured_device(graph: Graph, operators: Sequence[Operator], constants: frozenset[str]) -> Device:
    """The device whose work a capture of the net would hold. Raises DeviceError, naming the operator in the way."""
    devices = [graph.device(index) for index in range(len(graph))]
    captured = next((device for device in devices if device != CPU), None)
    if captured is None:
        raise DeviceError(f"net {graph.name!r} runs on the host: capture is for cuda:N and sim:N")
    dynamic = dynamic_operators(graph, constants)
    copies = {index for pair in copies_outside(graph, operators) for index in pair}
    rows = sorted(enumerate(zip(devices, operators, strict=True)), key=lambda row: row[1][0] != CPU)
    for index, (device, operator) in rows:  # operators of the host first, as they are why others copy
        schema = operator.schema
        reason = None
        if device == CPU:
            reason = "it runs on the host"
        elif device != captured:
            reason = f"it runs on {device}, others on {captured}, and a capture is of one device"
        elif index in dynamic:
            reason = "its shapes depend on values that the run computes"
        elif not schema.reproducible and not operator.arguments.bool("is_test"):
            reason = "it draws random numbers, which a replay would repeat"
        elif schema.effects or schema.mutates:
            reason = "it does more than write its outputs, which a replay would not do"
        elif operator.waits_for_device:
            reason = "it waits for the device"
        elif operator.crosses_devices and index not in copies and _touches_host(graph, index):
            reason = "it copies to or from the host in the middle of the run"
        if reason is not None:
            raise DeviceError(f"{operator.label} cannot be captured: {reason}; compile the net without capture")
    return captured


def copies_outside(graph: Graph, operators: Sequence[Operator]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The copies that a replay leaves to each run: of inputs, before it, and of results to the host, after it."""
    crossing = [i for i, operator in enumerate(operators) if operator.crosses_devices and _touches_host(graph, i)]
    before = tuple(index for index in crossing if not graph.parents[index])
    return before, tuple(index for index in crossing if not graph.children[index] and index not in before)


def _touches_host(graph: Graph, index: int) -> bool:
    return schema_of(graph.operators[index].type).crossing in (Crossing.FROM_HOST, Crossing.TO_HOST)


class CaptureStreams(DeviceStreams):
    """The streams of a net's captures: chains are assigned to them by dependencies, not by what is idle."""

    def __init__(self, device: Device, count: int, priority: Priority) -> None:
        super().__init__(device, count, priority)
        self._order: list[Stream] = []

    def all(self) -> list[Stream]:
        """Every stream; they are leased at the first call."""
        with self._lock:
            if not self._leased:
                streams = [self._runtime.lease(self._priority) for _ in range(self._per_worker)]
                self._leased = [(threading.current_thread(), streams)]
            return list(self._leased[0][1])

    def begin(self) -> list[Stream]:
        """All streams, for a capture that begins with none of them used."""
        streams = self.all()
        self._order, self._tails = list(streams), {}
        return streams

    def choose(self, parents: Sequence[Event]) -> Stream:
        """The stream that ends with one of `parents`, or one that is still empty, or the one used least recently."""
        tails = self._tails
        chosen = next((stream for event in parents for stream in self._order if tails.get(stream) is event), None)
        if chosen is None:
            chosen = next((stream for stream in self._order if stream not in tails), self._order[0])
        self._order.remove(chosen)
        self._order.append(chosen)
        tails[chosen] = None
        return chosen

    def give_back(self) -> None:
        """Return the streams that were leased. Idempotent."""
        if self._leased:
            super().give_back()


class _OnCaptureStreams(NetStreams):
    """A net's streams, where every group uses those of its captures."""

    def __init__(self, net: str, streams: CaptureStreams) -> None:
        super().__init__(net, 1, Priority.NORMAL)
        self._streams = streams

    def on(self, device: Device, group: str = "") -> DeviceStreams:
        return self._streams


class CapturedRun:
    """One run for one preparation, captured when this is made."""

    def __init__(
        self,
        net: str,
        operators: Sequence[Operator],
        preparation: Preparation,
        outside: tuple[tuple[int, ...], tuple[int, ...]],
        streams: CaptureStreams,
        guards: Sequence[tuple[str, ...]],
    ) -> None:
        """`outside` are the operators left to each run, before and after it. Raises what a launch raises."""
        kernels = kernels_of(operators, preparation)
        self._before, self._after = ([kernels[index] for index in row] for row in outside)
        left_out = {index for row in outside for index in row}
        plan = preparation.plan
        chains = [tuple(index for index in row if index not in left_out) for row in plan.chains]
        members = streams.begin()
        self._main = members[0]
        runtime = runtime_of(self._main.device)
        self._turns = _CapturedTurns()
        self._launched = LaunchedChains(
            operators,
            preparation,
            chains,
            synchronize(plan, guards, 1 if len(members) == 1 else None),
            _OnCaptureStreams(net, streams),
            finish=False,
            launch_under=self._turns.launch,
        )
        fork = runtime.event(f"the start of a capture of net {net!r}")
        joins = [runtime.event(f"the end of {stream.name} in a capture of net {net!r}") for stream in members[1:]]
        with runtime.capture(members) as self._capture:
            fork.record(self._main)
            for stream in members[1:]:
                stream.wait(fork)
            order = in_order(chain_tasks(plan))
            steps = chain.from_iterable(self._launched.steps[number] for number in order)
            run_inline(net, steps, preparation.name_step)
            for stream, join in zip(members[1:], joins, strict=True):
                join.record(stream)
                self._main.wait(join)
        self._capture.detach()
        self._resets = not runtime.issues_at_launch  # there the events are part of a graph
        self._events = [fork, *joins, *self._turns.events]
        self._shared = {
            id(buffer): buffer.turns
            for operator in operators
            if (buffer := operator.shared_buffer) is not None and buffer.turns is not None
        }
        self._kept = [*self._turns.take_workspaces(), *self._turns.buffers.values()]
        for stream in members:
            if stream.failure is not None:
                raise stream.failure.error

    def launch(self) -> None:
        """Put a run on the streams: inputs to the device, the replay, results to the host."""
        if self._resets:
            self._launched.reset()
            for event in self._events:
                event.reset()
        for kernel in self._before:
            self._main.launch(kernel)
        with ExitStack() as held:
            for turns in self._shared.values():
                held.enter_context(turns.turn(self._main))
            self._capture.replay()
        for kernel in self._after:
            self._main.launch(kernel)


class _CapturedTurns:
    """Turns at shared memory inside a capture, ordered by events of the capture alone.

    Outside, a replay as a whole takes one turn at a shared buffer. It no longer needs the handle or stream of a library
    state, whose workspace becomes its own.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ends: dict[str, tuple[Stream, Event]] = {}
        self._states: dict[int, Any] = {}
        self.buffers: dict[int, Array] = {}  # the arrays of shared buffers, which may grow and drop them

    def launch(self, operator: Operator, kernel: Kernel, guards: Sequence[str]) -> Launch:
        """Puts `kernel` on a stream after all earlier turns under one of `guards`."""
        if not guards:
            return lambda stream: stream.launch(kernel)
        state, buffer = operator.library_state, operator.shared_buffer
        if state is not None:
            self._states[id(state)] = state
        turns: StreamMutex | None = None if buffer is None else buffer.turns

        def launch(stream: Stream) -> None:
            with ExitStack() as held:
                for name in guards:
                    held.enter_context(self._turn(name, stream))
                if turns is not None:
                    held.enter_context(turns.captured())
                if state is not None:
                    held.enter_context(state.captured())
                stream.launch(kernel)
                if buffer is not None:
                    self.buffers[id(buffer.memory)] = buffer.memory

        return launch

    def take_workspaces(self) -> list[Array]:
        """The workspaces of the library states, which no other work gets from now on."""
        return [state.take_workspace() for state in self._states.values()]

    @contextmanager
    def _turn(self, name: str, stream: Stream) -> Iterator[None]:
        before = self._ends.get(name)
        if before is not None and before[0] is not stream:
            stream.wait(before[1])
        yield
        event = runtime_of(stream.device).event(f"turn {len(self.events)} at the {name} in a capture")
        event.record(stream)
        self.events.append(event)
        self._ends[name] = (stream, event)


def _width(plan: Plan) -> int:
    """The most chains that are ready at once when they go level by level; at least 1."""
    level = [0] * len(plan.chains)
    for number in in_order(chain_tasks(plan)):
        for child in plan.children[number]:
            level[child] = max(level[child], level[number] + 1)
    return max(map(level.count, set(level)), default=1)
