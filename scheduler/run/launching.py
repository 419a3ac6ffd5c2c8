"""Launching: the chains of a net as calls that put work on streams, and waits for the work to end.

On the host a chain is a tuple of prepared steps. On a device it is one call: choose a stream of the calling worker, let
it wait for the events of other chains where needed, launch the operators' steps, and record an event if a chain waits
for it. The calls follow a `Synchronization` to the letter.

A net leases its streams for itself, so that its failures do not affect other nets' work. The end of a run on streams is
`scheduler.run.drain`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from dagexec.core.device import CPU, Device
from dagexec.core.operator import Operator, Prepared, Step
from dagexec.core.runtime import runtime_of
from dagexec.core.stream import Event, Kernel, Priority, Stream, StreamFailure, StreamObserver, wait_for
from dagexec.core.tensor import Tensor
from dagexec.errors import DagexecError, RunCancelledError, RunTimeoutError
from dagexec.platform.threads import ThreadsEndedError, threads
from dagexec.scheduler.plan.culprit import operator_failure
from dagexec.scheduler.plan.preparation import Preparation
from dagexec.scheduler.run.work import ChainSteps

if TYPE_CHECKING:
    from dagexec.scheduler.observe.observed_run import ObservedRun
    from dagexec.scheduler.plan.synchronization import Synchronization

Launch = Callable[[Stream], object]


class _OwnStreams(threading.local):
    """The streams of the calling thread; `only` is set when it has no more than one."""

    only: Stream | None = None
    all: list[Stream] | None = None


class DeviceStreams:
    """The streams that a net has leased of one device: `per_worker` for every thread that launches for it.

    Attributes:
        own: the calling thread's, once it has chosen one.
    """

    def __init__(self, device: Device, per_worker: int, priority: Priority) -> None:
        self._runtime = runtime_of(device)
        self._per_worker = per_worker
        self._priority = priority
        self._lock = threads().lock()
        self._leased: list[tuple[threading.Thread, list[Stream]]] = []
        self._tails: dict[Stream, Event | None] = {}
        self.own = _OwnStreams()

    def all(self) -> list[Stream]:
        """Every stream leased so far."""
        with self._lock:
            return [stream for _, streams in self._leased for stream in streams]

    def choose(self, parents: Sequence[Event]) -> Stream:
        """A stream for the calling thread: one that ends with one of `parents`, or that is idle, or the next in turn.

        Directly after a parent the chain need not wait for it, and delays no other chain. Streams that have gone on
        since are not chosen for that: the children of one parent would all queue up on its stream.
        """
        mine = self.own.all
        if mine is None:
            mine = self._lease()
        if len(mine) == 1:
            return mine[0]
        tails = self._tails
        chosen = next((stream for event in parents for stream in mine if tails.get(stream) is event), None)
        if chosen is None:
            chosen = next((stream for stream in mine if stream.is_idle), mine[0])
        mine.remove(chosen)
        mine.append(chosen)
        tails[chosen] = None
        return chosen

    def ends_with(self, stream: Stream, event: Event) -> None:
        """`event` was recorded last on `stream`, by the thread that the stream belongs to."""
        self._tails[stream] = event

    def _lease(self) -> list[Stream]:
        """Streams for the calling thread: those of a thread that has ended, or new ones."""
        me = threading.current_thread()
        with self._lock:
            left = next((number for number, (owner, _) in enumerate(self._leased) if not owner.is_alive()), None)
            if left is not None:
                self._leased[left] = (me, self._leased[left][1])
                streams = self._leased[left][1]
        if left is None:
            streams = [self._runtime.lease(self._priority) for _ in range(self._per_worker)]
            with self._lock:
                self._leased.append((me, streams))
        self.own.all = list(streams)
        self.own.only = streams[0] if len(streams) == 1 else None
        return self.own.all

    def give_back(self) -> None:
        """Return all streams to the device, once they are idle. Idempotent."""
        streams = self.all()
        with self._lock:
            self._leased, self._tails = [], {}
        self.own = _OwnStreams()
        for stream in streams:
            stream.synchronize()
            self._runtime.give_back(stream)


class NetStreams:
    """The streams that a net has leased of all its devices."""

    def __init__(self, net: str, per_worker: int, priority: Priority) -> None:
        """`net` is its name, for messages."""
        self.net = net
        self.per_worker = per_worker
        self.stream_priority = priority
        self._lock = threads().lock()
        self._devices: dict[tuple[Device, str], DeviceStreams] = {}

    def hold(self, device: Device, group: str, streams: DeviceStreams) -> None:
        """Add `streams` of the `device` to this net's, for `group`."""
        with self._lock:
            self._devices[device, group] = streams

    def on(self, device: Device, group: str = "") -> DeviceStreams:
        """The streams of `device`; operators of one `group` have streams of their own, `per_worker` too."""
        with self._lock:
            if (device, group) not in self._devices:
                self._devices[device, group] = DeviceStreams(device, self.per_worker, self.stream_priority)
            return self._devices[device, group]

    def all(self) -> list[Stream]:
        """Every stream leased so far."""
        with self._lock:
            devices = list(self._devices.values())
        return [stream for streams in devices for stream in streams.all()]

    def give_back(self) -> None:
        """Return all streams to their devices, once they are idle. Idempotent."""
        with self._lock:
            devices = list(self._devices.values())
        for streams in devices:
            streams.give_back()


class DeviceChain:
    """A chain on a device, as a call. `event`, if any, is recorded at its end; with `finish`, the call waits for it.

    Raises the OperatorError of an operator that cannot be launched, or of one that failed earlier on the stream.
    """

    __slots__ = ("_choose", "_ends", "_finish", "_launches", "_net", "_number", "event", "observer", "stream", "waits")

    def __init__(
        self,
        net: str,
        number: int,
        streams: DeviceStreams,
        waits: Sequence[Event],
        launches: Sequence[tuple[str, Launch]],
        event: Event | None,
        finish: bool,
    ) -> None:
        """`launches` are labels of operators, and the functions that put them on a stream."""
        self._net = net
        self._number = number
        self._choose = streams.choose
        self._ends = streams.ends_with
        self.waits = tuple(waits)
        self._launches = tuple(launches)
        self._finish = finish
        self.event = event
        self.observer: StreamObserver | None = None
        self.stream: Stream | None = None

    def __call__(self) -> None:
        """Launch the whole chain."""
        self.begin()
        for position in range(len(self._launches)):
            self.launch(position)
        self.end()

    def launch(self, position: int) -> None:
        """Put the operator at `position` of the chain on the stream that `begin` has chosen."""
        label, launch = self._launches[position]
        assert self.stream is not None
        try:
            launch(self.stream)
        except Exception as error:
            raise self.failed(label, error) from error

    def begin(self) -> Stream:
        """Choose the stream, and let it wait for other chains on other streams."""
        stream = self.stream = self._choose(self.waits)
        stream.observer = self.observer
        if stream.failure is not None:
            raise self._stream_failed(stream.failure)
        for event in self.waits:
            if event.stream is not stream:
                self._wait(event, stream)
        return stream

    def end(self) -> None:
        """Record the event; wait for it if the chain is to be finished."""
        stream = self.stream
        assert stream is not None
        if self.event is not None:
            try:
                self.event.record(stream)
            except Exception as error:
                raise self.failed(f"{self.event.owner}: recording its event", error) from error
            self._ends(stream, self.event)
        if self._finish:
            stream.synchronize()
            if stream.failure is not None:
                raise self._stream_failed(stream.failure)

    def _wait(self, event: Event, stream: Stream) -> None:
        try:
            wait_for(event, stream)
        except Exception as error:
            raise self.failed(f"{event.owner}: waiting for its event", error) from error

    def failed(self, label: str, error: BaseException) -> DagexecError:
        """The run's error for `error`, raised while the operator called `label` was launched."""
        return operator_failure(self._net, label, error, self._number)

    def _stream_failed(self, failure: StreamFailure) -> DagexecError:
        assert self.stream is not None
        return device_failure(self._net, self.stream, failure)


def unguarded_chain(chain: DeviceChain, streams: DeviceStreams, kernels: Sequence[Kernel]) -> Step:
    """`chain`, of `kernels` that need no mutex and that nobody observes or waits for, as one function.

    It does what `DeviceChain.__call__` does. A net of many small operators spends its time here, hence the local names.
    """
    own, waits, work, event = streams.own, chain.waits, tuple(kernels), chain.event
    record = None if event is None else event.record

    def launch_all() -> None:
        stream = own.only
        if stream is None or stream.failing:
            chain()
            return
        doing: Event | Kernel | None = None
        try:
            for doing in waits:
                if doing.stream is not stream:
                    wait_for(doing, stream)
            launch = stream.launch
            for doing in work:
                launch(doing)
            if record is not None:
                doing = event
                record(stream)
        except Exception as error:
            raise chain.failed(_named(doing, event), error) from error

    return launch_all


def _named(doing: Event | Kernel | None, own: Event | None) -> str:
    """The name, in errors, of a launch, of a wait for an event, or of recording the chain's own event."""
    if isinstance(doing, Kernel):
        return doing.label
    assert doing is not None
    return f"{doing.owner}: {'recording' if doing is own else 'waiting for'} its event"


def device_failure(net: str, stream: Stream, failure: StreamFailure) -> DagexecError:
    """The error of a run whose work failed on `stream`."""
    if isinstance(failure.error, RunCancelledError | RunTimeoutError):
        return failure.error
    return operator_failure(net, failure.label, failure.error, worker=stream.name)


def kernels_of(operators: Sequence[Operator], preparation: Preparation) -> list[Kernel]:
    """The prepared step of each operator as work for a stream."""
    return [
        Kernel(
            preparation.steps[index],
            operator.label,
            preparation.seconds[index],
            operator,
            _copied_bytes(operator),
        )
        for index, operator in enumerate(operators)
    ]


def _copied_bytes(operator: Operator) -> int:
    """Bytes that `operator` copies between devices, if shapes are known; 0 when it computes."""
    if not operator.crosses_devices:
        return 0
    source, target = operator.input_blobs[0].value, operator.output_blobs[0].value
    if not isinstance(source, Tensor) or not isinstance(target, Tensor) or source.device == target.device:
        return 0
    return 0 if target.is_empty else target.nbytes


def guards_of(operator: Operator, prepared: Prepared | None) -> tuple[str, ...]:
    """The names of the mutexes that `operator` holds while it runs or is launched; unprepared, those that it may."""
    names = []
    buffer = operator.shared_buffer if prepared is None else prepared.shared_buffer
    if buffer is not None:
        names.append(buffer.name)
    if operator.library_state is not None:
        names.append(operator.library_state.name)
    return tuple(names)


def guarded_launch(operator: Operator, kernel: Kernel, guards: Sequence[str]) -> Launch:
    """Puts `kernel` on a stream while holding those of the operator's mutexes that `guards` names."""
    buffer, state = operator.shared_buffer, operator.library_state
    turns = buffer.turns if buffer is not None and buffer.name in guards else None
    uses_state = state is not None and state.name in guards

    def launch(stream: Stream) -> None:
        with ExitStack() as held:
            put: Callable[[Kernel], None] = stream.launch
            working = stream
            if state is not None and uses_state:
                put, working = held.enter_context(state.use(stream)), state.stream
            if turns is not None:
                held.enter_context(turns.turn(working))
            put(kernel)

    return launch if turns is not None or uses_state else lambda stream: stream.launch(kernel)


GuardedLaunch = Callable[[Operator, Kernel, Sequence[str]], Launch]


def stream_group(operator: Operator) -> str:
    """The group of streams that `operator` asks for by its argument `stream_group`; "" by default.

    Operators that mostly wait for other devices hold up nothing else there. A chain uses the group of its first
    operator.
    """
    return operator.arguments.string("stream_group", "")


class LaunchedChains:
    """The chains of a preparation as calls, with the events between them. One run at a time uses it.

    Attributes:
        steps: the calls of a run for each chain.
    """

    def __init__(
        self,
        operators: Sequence[Operator],
        preparation: Preparation,
        chains: Sequence[Sequence[int]],
        synchronization: Synchronization,
        streams: NetStreams,
        *,
        finish: bool,
        observed: ObservedRun | None = None,
        launch_under: GuardedLaunch | None = None,
    ) -> None:
        """With `finish`, each call waits until its chain is done.

        Operators may be missing from `chains`. `launch_under` makes the function that launches an operator under its
        mutexes.
        """
        self._operators = operators
        self._steps = preparation.steps
        self._kernels = kernels_of(operators, preparation)
        self._synchronization = synchronization
        self._streams = streams
        self._finish = finish
        self._launch_under = launch_under or guarded_launch
        self._events: dict[int, Event] = {
            chain: runtime_of(synchronization.devices[chain]).event(f"chain {chain} of net {streams.net!r}")
            for chain, recorded in enumerate(synchronization.records)
            if recorded
        }
        self.steps: ChainSteps = [self._chain(number, chain, observed) for number, chain in enumerate(chains)]

    def reset(self) -> None:
        """Make the events ready for the next run."""
        for event in self._events.values():
            event.reset()

    def _chain(self, number: int, chain: Sequence[int], observed: ObservedRun | None) -> tuple[Step, ...]:
        synchronization = self._synchronization
        waits = [self._event_of(parent, number) for parent in synchronization.waits[number]]
        device = synchronization.devices[number]
        if device == CPU:
            before = (self._host_wait(number, waits),) if waits else ()
            steps = [self._steps[index] for index in chain]
            return (*before, *steps) if observed is None else observed.chain(number, steps, waits=before)
        own = self._streams.on(device, stream_group(self._operators[chain[0]]) if chain else "")
        net, streams, event = self._streams.net, own, self._events.get(number)
        kernels = [self._kernels[index] for index in chain]
        launches = [
            (kernel.label, self._launch_under(self._operators[index], kernel, synchronization.guards[index]))
            for index, kernel in zip(chain, kernels, strict=True)
        ]
        launched = DeviceChain(net, number, streams, waits, launches, event, self._finish)
        if observed is None:
            plain = not self._finish and not any(synchronization.guards[index] for index in chain)
            return (unguarded_chain(launched, streams, kernels) if plain else launched,)
        launched.observer = observed.observer
        steps = [partial(launched.launch, position) for position in range(len(launches))]
        return observed.chain(number, steps, waits=(launched.begin,), after=(launched.end,))

    def _event_of(self, parent: int, child: int) -> Event:
        """The event that `child` waits for; one that is never recorded if the synchronization says so."""
        if parent not in self._events:
            device = self._synchronization.devices[parent]
            return runtime_of(device).event(f"chain {parent} of net {self._streams.net!r}, waited for by chain {child}")
        return self._events[parent]

    def _host_wait(self, number: int, waits: Sequence[Event]) -> Step:
        """Blocks a worker until the device chains that a host chain depends on are done."""
        net = self._streams.net

        def wait() -> None:
            for event in waits:
                try:
                    event.finish()
                except ThreadsEndedError:
                    raise
                except BaseException as error:  # a kernel may have raised anything
                    failure = event.stream.failure if event.stream is not None else None
                    if event.stream is not None and failure is not None:
                        failed = device_failure(net, event.stream, failure)
                        if failed is error:  # the run was stopped
                            raise
                        raise failed from error
                    raise operator_failure(net, f"{event.owner}: waiting for its event", error, number) from error

        return wait
