"""Detector: an observer that finds unordered accesses while a net runs, with a vector clock for each strand of work.

A strand is the work of one execution of a chain on one stream, or on the host. Its clock (Fidge 1988, Mattern 1989)
says which operators come before its next work. A clock has a component for each strand, and since an operator belongs
to one strand, the clock is kept as the set of operators, a bit each: joining two clocks is one `|`, and whether an
access comes before, FastTrack's comparison of an epoch with a clock (Flanagan, Freund 2009), is one bit. As in
FastTrack, the last writer of each resource and the readers since are kept.

Everything is computed on the host while work is launched, which settles the order on a device. Order that came about by
chance in this run is left out, so that a missing dependency is found whatever the schedule was:

    host      a chain begins after its parents in the plan, not after what its worker did before
    stream    the strand of a chain begins after those earlier strands on the stream whose chains the plan launches
              before it, not after those that happened to come first; two chains without a dependency are found even
              when they share a stream
    event     a strand, or a host thread, that waits for an event continues after the strand that recorded it, if the
              plan launches that chain before
    turns     a strand that follows another in a turn at working memory is not ordered after it for any other memory

For working memory itself that is too strict: two users that held one mutex may have come in either order. On a device
their work must then have been ordered by what the streams really waited for, chance included.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field

from dagexec.core.device import CPU
from dagexec.core.exclusive import WatchedTurns, watch_turns
from dagexec.core.graph import Hazard
from dagexec.core.operator import Operator
from dagexec.core.stream import Event, Kernel, Stream
from dagexec.core.tensor import binding_epoch
from dagexec.errors import HazardError
from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads
from dagexec.scheduler.hazards.accesses import Accesses, prepared_accesses
from dagexec.scheduler.hazards.piece_watch import PieceWatch
from dagexec.scheduler.hazards.pieces import PieceFault
from dagexec.scheduler.observe.observed_run import ObservedRun
from dagexec.scheduler.observe.observers import Observer


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses that nothing orders, seen in a run.

    Attributes:
        resource: what both touch.
        kind: RAW, WAR or WAW, in list order.
        earlier, later: the labels of the operators, in list order.
        earlier_place, later_place: the stream or worker of each.
    """

    resource: str
    kind: Hazard
    earlier: str
    later: str
    earlier_place: str
    later_place: str

    def __str__(self) -> str:
        return (
            f"{self.kind.name} on {self.resource}: {self.earlier} ({self.earlier_place}) and {self.later} "
            f"({self.later_place}) are not ordered"
        )


@dataclass(slots=True)
class _Access:
    """An access: the operator's bit, where it was made, and the mutexes held."""

    bit: int
    run: _RunClocks
    operator: int
    place: str
    held: frozenset[str]
    on_host: bool


@dataclass(slots=True)
class _Shadow:
    """The last writer of a resource, and the readers since."""

    writer: _Access | None = None
    readers: list[_Access] = field(default_factory=list)


@dataclass(slots=True)
class _Recorded:
    """The clocks of an event: that of the strand that recorded it, and that of its stream as it really was."""

    run: _RunClocks
    chain: int
    clock: int
    actual: int


class _RunClocks:
    """The clocks of one run.

    Attributes:
        base: the number of the bit of operator 0.
        host: per chain, the clock of its host strand, in the end that of the chain's end.
        launched: per chain, the chains that the plan launches before it, as bits.
        ended: chains that the host has left.
        strands: per stream, the chains that have put work there and their clocks, in order.
        chain_of: the chain of each operator.
        on_host: nothing is put on streams, and a chain may change its worker between two operators.
    """

    def __init__(self, run: ObservedRun, accesses: Accesses, base: int, before: int) -> None:
        self.run = run
        self.accesses = accesses
        self.base = base
        self.before = before
        count = len(run.chains)
        self.chain_of = {operator: number for number, chain in enumerate(run.chains) for operator in chain}
        self.on_host = all(run.graph.device(operator) == CPU for operator in self.chain_of)
        self.host = [before] * count
        self.launched = [0] * count
        self.ended = [False] * count
        self.strands: dict[Stream, dict[int, int]] = {}
        self.shadows: dict[int, _Shadow] = {}

    @property
    def everything(self) -> int:
        """The clock at the end of the run."""
        return self.before | ((1 << len(self.run.graph)) - 1) << self.base

    def begin(self, chain: int) -> None:
        """The host strand of `chain` begins."""
        for parent in self.run.parents[chain]:
            if self.ended[parent]:
                self.host[chain] |= self.host[parent]
                self.launched[chain] |= self.launched[parent] | 1 << parent

    def comes_before(self, other: int, chain: int) -> bool:
        """True when the plan launches chain `other` before `chain`, or they are the same."""
        return other == chain or bool(self.launched[chain] >> other & 1)

    def strand(self, chain: int, stream: Stream) -> int:
        """The clock of `chain` on `stream`; begins the strand."""
        strands = self.strands.setdefault(stream, {})
        clock = strands.get(chain, 0) | self.host[chain]
        if chain not in strands:
            for other, earlier in strands.items():
                if self.launched[chain] >> other & 1:
                    clock |= earlier
        strands[chain] = clock
        return clock


class _Working(threading.local):
    """The chain and the operator that the calling thread works on, and the mutexes held for that."""

    clocks: _RunClocks | None = None
    chain = -1
    operator: int | None = None
    turns: WatchedTurns | None = None


class Detector(Observer):
    """Finds unordered accesses in runs that it observes: pass it as `trace` to `run`, of any number of nets at once.

    Streams must tell it what is launched (`core.runtime.StreamObserver`), as those of `sim` do. `races` holds each pair
    of operators once per resource, and what is wrong with pieces of operators; `accesses` counts those examined.
    """

    def __init__(self) -> None:
        self.races: list[Race | PieceFault] = []
        self.accesses = 0
        self._lock = threads().lock()
        self._working = _Working()
        self._runs: dict[ObservedRun, _RunClocks] = {}
        self._known: weakref.WeakKeyDictionary[Operator, tuple[int, Accesses]] = weakref.WeakKeyDictionary()
        self._ended: dict[int, tuple[Sequence[Operator], int]] = {}  # keeps the operators, so that no id is reused
        self._next_bit = 0
        self._events: weakref.WeakKeyDictionary[Event, _Recorded] = weakref.WeakKeyDictionary()
        self._actual: dict[Stream, int] = {}
        self._turns: dict[tuple[str, int], list[_Access]] = {}
        self._found: set[tuple[str, str, str] | PieceFault] = set()
        self._pieces = PieceWatch()

    def raise_found(self) -> None:
        """Raise HazardError with all races, if any was found."""
        if self.races:
            more = f" (and {len(self.races) - 1} more)" if len(self.races) > 1 else ""
            raise HazardError(f"{self.races[0]}{more}", tuple(map(str, self.races)))

    def run_started(self, run: ObservedRun) -> None:
        """Begin the clocks of the run, which comes after the earlier runs of its net."""
        with self._lock:
            _, before = self._ended.get(id(run.operators), (run.operators, 0))
            self._runs[run] = _RunClocks(run, self._accesses_of(run), self._next_bit, before)
            self._next_bit += len(run.graph)

    def run_stopped(self, run: ObservedRun, end: int, error: BaseException | None) -> None:
        """Order later runs of the net after it; forget everything when no run is under way.

        The owner of the run may use its results now, so its streams must have come to their end.
        """
        with self._lock:
            clocks = self._runs.pop(run)
            if error is None:
                shared = {stream for other in self._runs.values() for stream in other.strands}
                for stream in clocks.strands:
                    if stream not in shared and not stream.is_idle:
                        self._report_early_end(clocks, stream)
            self._ended[id(run.operators)] = (run.operators, clocks.everything)
            self._pieces.run_stopped(run)
            if not self._runs:
                self._pieces.forget()
                self._next_bit = 0
                for table in (self._ended, self._events, self._actual, self._turns):
                    table.clear()

    def chain_started(self, run: ObservedRun, chain: int, worker: str, ready: int, start: int) -> None:
        """The calling thread works on `chain` now."""
        with self._lock:
            clocks, working = self._runs[run], self._working
            clocks.begin(chain)
            if not clocks.on_host:
                working.clocks, working.chain, working.operator = clocks, chain, None

    def chain_stopped(
        self, run: ObservedRun, chain: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        with self._lock:
            self._runs[run].ended[chain] = True
            self._working.clocks = None

    def operator_started(self, run: ObservedRun, operator: int, worker: str) -> None:
        """The calling thread works on `operator` now."""
        self._report_pieces(self._pieces.operator_started(run, operator))
        working = self._working
        working.operator, working.turns = operator, watch_turns()

    def piece_started(self, run: ObservedRun, operator: int, phase: int, piece: int, worker: str) -> None:
        """The calling thread no longer has an operator to itself."""
        self._working.operator = self._working.turns = None

    def piece_stopped(
        self,
        run: ObservedRun,
        operator: int,
        phase: int,
        piece: int,
        worker: str,
        start: int,
        end: int,
        error: BaseException | None,
    ) -> None:
        self._pieces.piece_stopped(run, operator, phase, piece)

    def operator_stopped(
        self, run: ObservedRun, operator: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        """Record the accesses of an operator that ran on the host."""
        working = self._working
        working.operator = None
        if run.graph.device(operator) != CPU:
            return
        if error is None:
            self._report_pieces(self._pieces.operator_stopped(run, operator))
        with self._lock:
            clocks = self._runs[run]
            chain = clocks.chain_of[operator]
            clock = clocks.host[chain]
            mutexes = frozenset(working.turns.taken if working.turns is not None else ())
            access = _Access(clocks.base + operator, clocks, operator, f"worker {worker}", mutexes, True)
            self._touch(access, clock, clock)
            clocks.host[chain] = clock | 1 << access.bit
        working.turns = None

    def launched(self, stream: Stream, kernel: Kernel) -> None:
        """Record the accesses of an operator's kernel, at its place in `stream`."""
        working = self._working
        clocks, operator = working.clocks, working.operator
        if clocks is None:
            return
        with self._lock:
            clock = clocks.strand(working.chain, stream)
            actual = self._actual.get(stream, 0) | clock
            if operator is not None and kernel.operator is clocks.run.operators[operator]:
                mutexes = frozenset(working.turns.held if working.turns is not None else ())
                access = _Access(clocks.base + operator, clocks, operator, stream.name, mutexes, False)
                self._touch(access, clock, actual)
                clocks.strands[stream][working.chain] = clock | 1 << access.bit
                actual |= 1 << access.bit
            self._actual[stream] = actual

    def recorded(self, stream: Stream, event: Event) -> None:
        """Give the event the clock of the strand."""
        working = self._working
        if working.clocks is None:
            return
        with self._lock:
            clock = working.clocks.strand(working.chain, stream)
            actual = self._actual[stream] = self._actual.get(stream, 0) | clock
            self._events[event] = _Recorded(working.clocks, working.chain, clock, actual)

    def waits(self, stream: Stream, event: Event) -> None:
        """Continue the strand after the event's."""
        working = self._working
        if working.clocks is None:
            return
        with self._lock:
            record = self._events.get(event)
            if record is None:
                return
            clock = working.clocks.strand(working.chain, stream)
            if self._orders(record):
                clock = working.clocks.strands[stream][working.chain] = clock | record.clock
            self._actual[stream] = self._actual.get(stream, 0) | clock | record.actual

    def host_waited(self, event: Event | Stream) -> None:
        """Continue the host strand after the event's, or after those on the stream."""
        clocks, chain = self._working.clocks, self._working.chain
        if clocks is None:
            return
        with self._lock:
            if isinstance(event, Stream):
                for other, clock in clocks.strands.get(event, {}).items():
                    if clocks.comes_before(other, chain):
                        clocks.host[chain] |= clock
                return
            record = self._events.get(event)
            if record is not None and self._orders(record):
                clocks.host[chain] |= record.clock

    def _orders(self, record: _Recorded) -> bool:
        """True when the calling thread's strand comes after the event in every schedule that has the same waits.

        Waits for other chains while an operator is launched are turns.
        """
        working = self._working
        if record.run is not working.clocks:
            return False
        if working.operator is not None:
            return record.chain == working.chain
        return record.run.comes_before(record.chain, working.chain)

    def _touch(self, access: _Access, clock: int, actual: int) -> None:
        """Compare the accesses of an operator with earlier ones. Call with the lock held."""
        clocks, operator = access.run, access.operator
        resources = clocks.accesses.resources
        for number in clocks.accesses.writes[operator]:
            if resources[number].exclusive:
                self._take_turn(access, resources[number].name, clock, actual)
                continue
            shadow = clocks.shadows.setdefault(number, _Shadow())
            for other in (shadow.writer, *shadow.readers):
                if other is not None and other.bit != access.bit:
                    self._hold_against(other, access, clock, number)
            shadow.writer, shadow.readers = access, []
            self.accesses += 1
        written = clocks.accesses.writes[operator]
        for number in clocks.accesses.reads[operator]:
            if number not in written:
                shadow = clocks.shadows.setdefault(number, _Shadow())
                if shadow.writer is not None:
                    self._hold_against(shadow.writer, access, clock, number)
                shadow.readers.append(access)
                self.accesses += 1

    def _hold_against(self, before: _Access, access: _Access, clock: int, number: int) -> None:
        if not clock >> before.bit & 1:
            self._report(before, access, access.run.accesses.resources[number].name, self._kind(before, access, number))

    def _kind(self, before: _Access, access: _Access, number: int) -> Hazard:
        accesses = access.run.accesses
        earlier, later = sorted((before.operator, access.operator))
        if number not in accesses.writes[later]:
            return Hazard.RAW
        if number not in accesses.writes[earlier]:
            return Hazard.WAR
        return Hazard.RAW if number in accesses.reads[later] else Hazard.WAW

    def _take_turn(self, access: _Access, name: str, clock: int, actual: int) -> None:
        operator = access.run.run.operators[access.operator]
        memory = operator.shared_buffer if _is_of(operator.shared_buffer, name) else operator.library_state
        users = self._turns.setdefault((name, id(memory)), [])
        for other in users:
            excluded = other.held & access.held and (access.on_host or actual >> other.bit & 1)
            if not clock >> other.bit & 1 and not excluded:
                self._report(other, access, name, Hazard.WAW)
        users.append(access)
        self.accesses += 1

    def _report(self, before: _Access, access: _Access, resource: str, kind: Hazard) -> None:
        first, second = sorted((before, access), key=lambda side: side.operator)
        labels = [side.run.run.graph.label(side.operator) for side in (first, second)]
        key = (resource, labels[0], labels[1])
        if key not in self._found:
            self._found.add(key)
            self.races.append(Race(resource, kind, labels[0], labels[1], first.place, second.place))

    def _report_pieces(self, faults: Iterable[PieceFault]) -> None:
        with self._lock:
            new = [fault for fault in faults if fault not in self._found]
            self._found.update(new)
            self.races += new

    def _report_early_end(self, clocks: _RunClocks, stream: Stream) -> None:
        """The run is over for its owner, but work on `stream` is not."""
        last = clocks.run.chains[list(clocks.strands[stream])[-1]]
        label = clocks.run.graph.label(last[-1]) if last else stream.name
        self.races.append(Race("the results", Hazard.RAW, label, "the end of the run", stream.name, "the host"))

    def _accesses_of(self, run: ObservedRun) -> Accesses:
        if not run.operators:
            return Accesses((), (), ())
        epoch = binding_epoch()
        entry = self._known.get(run.operators[0])
        if entry is None or entry[0] != epoch:
            entry = self._known[run.operators[0]] = (epoch, prepared_accesses(run.graph, run.operators, run.prepared))
        return entry[1]


def _is_of(memory: object, name: str) -> bool:
    return getattr(memory, "name", None) == name


@contextmanager
def detecting() -> Iterator[Detector]:
    """A detector to pass as `trace`; raises HazardError at the end of the block for races."""
    detector = Detector()
    yield detector
    detector.raise_found()
