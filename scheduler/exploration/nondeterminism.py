"""What a schedule does not control: a schedule is run twice, and the point where the two runs part is reported.

Decisions determine a run only if nothing else does: real time, randomness without a seed, addresses (the order of a set
of objects), threads that the schedule did not start, garbage collection. Two runs that differ under the same decisions
have such a cause. They are run again under Python's profiler, which sees calls of functions that tell the time and the
like; the place where they part, and the code there, is the evidence.
"""

from __future__ import annotations

import builtins
import dis
import gc
import os
import random
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any

from dagexec.platform.records import dataclass
from dagexec.platform.threads import Threads
from dagexec.scheduler.exploration.controlled import ControlledThreads
from dagexec.scheduler.exploration.exploring import ExploredSchedule, Result, Scenario, explore
from dagexec.scheduler.exploration.schedule_file import Saved, SavedSchedule, unplaced
from dagexec.scheduler.exploration.strategies import ReplayStrategy

_ATTEMPTS = 4
_MOST_CAUSES = 4
_PACKAGE = str(PurePath(__file__).parents[2])
_MACHINERY = (str(PurePath(__file__).parent), str(sys.modules[Threads.__module__].__file__))
_STANDARD = sysconfig.get_paths()["stdlib"]
_ARRIVALS = (ControlledThreads.come_to.__code__, ControlledThreads.wait.__code__)
_UNCONTROLLED = "a thread that is not of the schedule"
_BY_ADDRESS = "addresses of objects"


def _telling_calls() -> dict[object, str]:
    """Functions whose results no schedule decides, each with the cause that it stands for."""
    clocks = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "sleep")
    names = (*clocks, *(f"{name}_ns" for name in clocks[:-1]))
    causes: dict[object, str] = {getattr(time, name): "real time" for name in names}
    causes |= {getattr(random, name): "randomness without a seed" for name in ("random", "getrandbits")}
    causes |= {os.urandom: "randomness without a seed", gc.collect: "garbage collection"}
    causes |= {builtins.id: _BY_ADDRESS}
    starts = ("start_new_thread", "start_joinable_thread")  # the second since Python 3.13
    return causes | {getattr(threading, f"_{name}"): _UNCONTROLLED for name in starts if hasattr(threading, f"_{name}")}


_TELLING = _telling_calls()


@dataclass(frozen=True)
class Parting:
    """Where two runs under the same decisions part.

    Attributes:
        step: how many decision points they have in common.
        first, second: the next thread of each run with its decision point and place in the code.
        causes: possible reasons, the likeliest first; may be empty.
    """

    step: int
    first: str
    second: str
    causes: tuple[str, ...]

    def __str__(self) -> str:
        why = f"likely cause: {'; '.join(self.causes)}" if self.causes else "no cause was found"
        return (
            f"two runs under the same decisions part after {self.step} steps: {self.first} in one, {self.second} in "
            f"the other; {why}"
        )


def parting(scenario: Scenario[Result], schedule: ExploredSchedule[Result], runs: int = 1) -> Parting | None:
    """Where runs of `scenario` under the decisions of `schedule` part; None when `runs` more repeat the first one."""
    others = (_again(scenario, schedule) for _ in range(runs))
    again = next((one for one in others if not _same(schedule, one)), None)
    if again is None:
        return None
    for _ in range(_ATTEMPTS):
        one = _Watch()
        with one.watching():
            _again(scenario, schedule)
        arrivals = one.arrivals
        other = _Watch(lambda number, found, arrivals=arrivals: [found] != arrivals[number : number + 1])  # type: ignore[misc]
        with other.watching():
            _again(scenario, schedule)
        if other.parted is not None:
            first = str(arrivals[other.parted]) if other.parted < len(arrivals) else "the end"
            return _told(first, other, other.parted, one.calls)
    both = zip_longest(schedule.trace, again.trace)
    step = next((number for number, (one, other) in enumerate(both) if one != other), len(again.trace))
    once = "something that outlives a run (a cache, a global): later runs are all alike"
    return Parting(step, _step_of(schedule, step), _step_of(again, step), (once,))


def parting_from(scenario: Scenario[Result], saved: SavedSchedule) -> Parting | None:
    """Where `scenario` leaves a schedule of another process; None where each thread does what it did there.

    Sets of strings have another order in each process, and lines another number in each version of a file.
    """
    expected: dict[str, list[Saved]] = {}
    for step in saved.steps:
        if step.kind != "begin":
            expected.setdefault(step.thread, []).append(step)
    made: Counter[str] = Counter()

    def differs(_: int, arrival: _Arrival) -> bool:
        made[arrival.thread] += 1
        before = expected.get(arrival.thread, ())[made[arrival.thread] - 1 : made[arrival.thread]]
        return any(
            one.resource != unplaced(arrival.resource) or one.kind not in (arrival.kind, "timeout") for one in before
        )

    watch = _Watch(differs, across_processes=True)
    with watch.watching():
        explore(scenario, saved.strategy())
    if watch.parted is None:
        return None
    thread = watch.arrivals[watch.parted].thread
    before = expected[thread][_made_then(watch.arrivals, watch.parted) - 1]
    return _told(f"{thread}: {before.kind} {before.resource}", watch, watch.parted, ())


def _made_then(arrivals: Sequence[_Arrival], number: int) -> int:
    """How many of the arrivals up to `number` are of the same thread as that one."""
    return sum(arrival.thread == arrivals[number].thread for arrival in arrivals[: number + 1])


def _again(scenario: Scenario[Result], schedule: ExploredSchedule[Result]) -> ExploredSchedule[Result]:
    return explore(scenario, ReplayStrategy(schedule.decisions, timeouts=schedule.timeouts))


def _same(one: ExploredSchedule[Any], other: ExploredSchedule[Any]) -> bool:
    return one.trace == other.trace and repr(one.failure) == repr(other.failure)


def _step_of(schedule: ExploredSchedule[Any], number: int) -> str:
    if number < len(schedule.trace):
        return f"{schedule.trace[number].thread}: {schedule.trace[number]}"
    return "the end" if schedule.failure is None else f"{type(schedule.failure).__name__}: {schedule.failure}"


@dataclass(frozen=True)
class _Arrival:
    """A thread at a decision point."""

    thread: str
    kind: str
    resource: str
    place: str

    def __str__(self) -> str:
        return f"{self.thread}: {self.kind} {self.resource} at {self.place}"


@dataclass(frozen=True)
class _Call:
    """A call of a function whose result no schedule decides; `is_ours` in the code of dagexec."""

    cause: str
    name: str
    place: str
    is_ours: bool

    def __str__(self) -> str:
        return f"{self.cause}: {self.name} at {self.place}"


class _Watch:
    """Notes on a run: which thread reached which decision point, and which calls had results that no schedule decides.

    Attributes:
        parted: number of the first arrival that `differs` from what is expected.
        around: where the runs part, innermost first.
        unordered: values there whose order depends on addresses.
    """

    def __init__(
        self, differs: Callable[[int, _Arrival], bool] | None = None, *, across_processes: bool = False
    ) -> None:
        self.arrivals: list[_Arrival] = []
        self.calls: list[_Call] = []
        self.parted: int | None = None
        self.around: list[str] = []
        self.unordered: list[str] = []
        self._differs = differs
        self._across_processes = across_processes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, threads that begin are watched."""
        before = threading.getprofile()
        threading.setprofile(self._told_of)
        try:
            yield
        finally:
            threading.setprofile(before)

    def _told_of(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in _ARRIVALS:
            self._arrive(frame)
        elif event == "c_call":
            cause = _cause(argument)
            caller = None if cause is None else _caller(frame)
            if cause is not None and caller is not None:
                name = getattr(argument, "__qualname__", str(argument))
                self.calls.append(_Call(cause, name, _text(caller), caller.f_code.co_filename.startswith(_PACKAGE)))

    def _arrive(self, frame: FrameType) -> None:
        variables, places = frame.f_locals, list(_places(frame))
        place = _text(places[0]) if places else "its start"
        arrival = _Arrival(threading.current_thread().name, variables["kind"], variables["resource"], place)
        number = len(self.arrivals)
        self.arrivals.append(arrival)
        if self._differs is not None and self.parted is None and self._differs(number, arrival):
            self.parted = number
            self.around = list(map(_text, places))
            self.unordered = [text for caller in places for text in _unordered(caller, self._across_processes)]


def _cause(function: object) -> str | None:
    try:
        return _TELLING.get(function)
    except TypeError:  # a method of something that has no hash
        return None


def _is_standard(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith("<frozen") or (name.startswith(_STANDARD) and "site-packages" not in name)


def _places(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames outside the machinery and Python's library, innermost first."""
    while frame is not None:
        if not _is_standard(frame) and not frame.f_code.co_filename.startswith(_MACHINERY):
            yield frame
        frame = frame.f_back


def _caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside Python's library; None where the machinery itself calls."""
    while frame is not None and _is_standard(frame):
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_filename.startswith(_MACHINERY) else frame


def _text(frame: FrameType) -> str:
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def _unordered(frame: FrameType, across_processes: bool) -> Iterator[str]:
    """Sets that the code of `frame` names whose order is by chance, and uses of `id`.

    The order is that of addresses, or of the hashes of strings, which each process draws.
    """
    code, local = frame.f_code, frame.f_locals
    of_self = getattr(local.get("self"), "__dict__", {})
    named = dict(local)
    named |= {f"self.{name}": of_self[name] for name in code.co_names if name in of_self}
    named |= {name: frame.f_globals[name] for name in code.co_names if name in frame.f_globals}
    for name, value in named.items():
        kinds = {type(element) for element in value} if isinstance(value, set | frozenset) and len(value) > 1 else set()
        if hashed := sorted(kind.__name__ for kind in kinds if getattr(kind, "__hash__", None) is object.__hash__):
            yield f"the order of the set {name!r} of {', '.join(hashed)}, which hash by address, at {_text(frame)}"
        if across_processes and kinds & {str, bytes}:
            yield f"the order of the set {name!r} of strings, which hash anew in each process, at {_text(frame)}"
    if "id" in code.co_names:
        yield f"{_BY_ADDRESS}: id at {_text(frame)}"
    if _makes_set(code):
        yield f"the order of a set that is made in {_text(frame)}"


def _makes_set(code: CodeType) -> bool:
    nested = any(
        isinstance(one, CodeType) and one.co_name == "<setcomp>" for one in code.co_consts
    )  # until Python 3.11
    named = {"set", "frozenset"} & set(code.co_names)
    return nested or bool(named) or any(one.opname in ("BUILD_SET", "SET_ADD") for one in dis.get_instructions(code))


def _told(first: str, other: _Watch, number: int, before: Sequence[_Call]) -> Parting:
    """The report on two runs that part at arrival `number`; causes at that place are likelier than earlier ones.

    `first` is the action of the first run there; it made the calls `before`.
    """
    calls = {str(call): call for call in (*before, *other.calls)}
    if any(not call.is_ours for call in calls.values()):
        calls = {text: call for text, call in calls.items() if not call.is_ours}
    there = [text for text, call in calls.items() if call.place in other.around]
    threads = [text for text, call in calls.items() if call.cause == _UNCONTROLLED]
    causes = list(dict.fromkeys((*there, *other.unordered, *threads, *reversed(calls))))[:_MOST_CAUSES]
    return Parting(number, first, str(other.arrivals[number]), tuple(causes))
