"""Random programs of launches, records and waits, and what must hold of every order in which they are executed."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from dagexec.core.stream import Event, Kernel, Stream
from dagexec.devices.sim import SimRuntime


@dataclass(frozen=True)
class Launch:
    stream: int
    number: int


@dataclass(frozen=True)
class Record:
    stream: int
    event: int


@dataclass(frozen=True)
class Await:
    stream: int
    event: int


Instruction = Launch | Record | Await
Program = tuple[Instruction, ...]


@st.composite
def programs(draw: st.DrawFn, streams: int = 4, length: int = 40) -> Program:
    """Instructions in which every event is recorded once, before any wait for it."""
    found: list[Instruction] = []
    events = 0
    for number in range(draw(st.integers(1, length))):
        stream = draw(st.integers(0, streams - 1))
        kind = draw(st.sampled_from(["launch", "launch", "record", "wait"]))
        if kind == "wait" and events:
            found.append(Await(stream, draw(st.integers(0, events - 1))))
        elif kind == "record":
            found.append(Record(stream, events))
            events += 1
        else:
            found.append(Launch(stream, number))
    return tuple(found)


def put(program: Program, runtime: SimRuntime, streams: list[Stream], log: list[int]) -> list[Event]:
    """Ask `streams` for all of the program. Its kernels append their numbers to `log`; the events are returned."""
    events: list[Event] = []
    for instruction in program:
        stream = streams[instruction.stream]
        match instruction:
            case Launch(_, number):
                stream.launch(Kernel(lambda number=number: log.append(number), f"kernel {number}"))
            case Record(_, event):
                events.append(runtime.event(f"event {event}"))
                events[event].record(stream)
            case Await(_, event):
                stream.wait(events[event])
    return events


def predecessors(program: Program) -> dict[int, set[int]]:
    """For each kernel, those that must be done before it: by the order of its stream, and through events."""
    on_stream: dict[int, set[int]] = {}
    at_event: dict[int, set[int]] = {}
    before: dict[int, set[int]] = {}
    for instruction in program:
        done = on_stream.setdefault(instruction.stream, set())
        match instruction:
            case Launch(_, number):
                before[number] = set(done)
                done.add(number)
            case Record(_, event):
                at_event[event] = set(done)
            case Await(_, event):
                done |= at_event[event]
    return before
