"""Sessions under all schedules with few preemptions: runs of one never overlap, forks never write what others read.

Sessions, their states, caches and memory are dagexec's. The net of a step is not: it adds positions as attention does,
and computes a digest of all positions before and after it lets other threads go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.binding.io_binding import Outputs
from dagexec.compiler.stepping import CACHE, LENGTH, Layer
from dagexec.core.caches import Caches, caches_of
from dagexec.core.feeds import Feeds
from dagexec.errors import DagexecError, ResourceError, SessionBusyError
from dagexec.executor.model_runner import ModelRunner
from dagexec.executor.requests.call import Call
from dagexec.executor.sessions import states
from dagexec.executor.sessions.memory import SessionMemory
from dagexec.executor.sessions.session import Session
from dagexec.executor.sessions.states import States
from dagexec.executor.sessions.steps import StepNet, StepNets
from dagexec.executor.source.loading import load_model
from dagexec.executor.source.types import GivenTypes
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import systematic
from tests.executor.decoders import CACHES, ELEMENTS, KEY_HEADS, decoder

MODEL = load_model(decoder())
TYPES = GivenTypes.of(MODEL)
LAYERS = [
    Layer(keys, values, (0, 1, 2, 3), (0, 1, 2, 3)) for keys, values in zip(CACHES[::2], CACHES[1::2], strict=True)
]
BYTES = 2 * len(LAYERS) * KEY_HEADS * ELEMENTS * 4
"""Of a position in caches."""


class Net(ModelRunner):
    """Puts positions behind the others, and tells what all of them are."""

    def __init__(self) -> None:
        self.model = MODEL
        self._under_way: set[int] = set()

    def close(self) -> None: ...

    async def aclose(self) -> None: ...

    async def _run_async(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        raise AssertionError

    def _run(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        fed = cast("Mapping[str, npt.NDArray[Any]]", feeds)
        number, start, token = int(fed[CACHE][0]), int(fed[LENGTH][0]), int(fed["ids"][0, 0])
        caches = caches_of(number, "step")
        assert caches.number not in self._under_way, "two runs have one cache"
        assert not caches.is_shared, "a run writes what another session reads"
        self._under_way.add(caches.number)
        before = _digest(caches, start)
        _others_go_on()
        held, new = caches.at(number, start), (1, KEY_HEADS, 1, ELEMENTS)
        for layer in LAYERS if held else ():
            keys, values = held.layer((layer.keys, layer.values), (new, new), "step")
            keys[..., start] = values[:, :, start] = token
        _others_go_on()
        assert _digest(caches, start) == before, "what was there has changed"
        self._under_way.remove(caches.number)
        return {"scores": np.array(_digest(caches, start + 1))}


def _digest(caches: Caches, length: int) -> list[float]:
    """Of the positions: the token of each, where all layers agree."""
    keys, values = caches.held(length)
    rows = [array[0, 0, :, 0].tolist() for array in (*keys.values(), *values.values())]
    assert all(row == rows[0] for row in rows)
    return list(rows[0])


def _others_go_on() -> None:
    with threads().lock():
        pass


class _Nets(StepNets):
    """One for all sizes."""

    def __init__(self, net: Net) -> None:
        self._net = StepNet(cast(Any, SimpleNamespace(layers=LAYERS)), net)

    def find(self, *_: object) -> StepNet | None:
        return self._net


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """That outgrow their first room in a few steps; others go on while they are cut."""
    monkeypatch.setattr(states, "_LEAST_CAPACITY", 4)
    cut = States.cut

    def slowly(self: States, length: int) -> int:
        _others_go_on()
        return cut(self, length)

    monkeypatch.setattr(States, "cut", slowly)


def _new_session(limit: int | None = None, other: Session | None = None) -> Session:
    """One of an executor: that of the `other`, or a new one, whose caches may take `limit` bytes."""
    if other is not None:
        return Session(other._executor, TYPES, other._nets, other._memory, None)
    net = Net()
    return Session(net, TYPES, _Nets(net), SessionMemory("decoder", limit), None)


def _step(session: Session, token: int) -> list[int]:
    """All positions after a run that adds one."""
    return [int(one) for one in session.run({"ids": np.array([[token]])})["scores"]]


def _at_the_same_time(
    *calls: Callable[[], list[int]], refused: type[DagexecError] = SessionBusyError
) -> list[list[int]]:
    """What they return; nothing where one is `refused`."""
    results: list[list[int]] = [[] for _ in calls]

    def call(number: int) -> None:
        with suppress(refused):
            results[number] = calls[number]()

    callers = [threads().start(partial(call, number), f"caller {number}") for number in range(len(calls))]
    for caller in callers:
        caller.join()
    return results


def runs_of_one_session() -> None:
    session = _new_session()
    _step(session, 1)
    results = _at_the_same_time(partial(_step, session, 2), partial(_step, session, 3))
    after = sorted(filter(None, results), key=len)
    assert after in ([[1, 2]], [[1, 3]], [[1, 2], [1, 2, 3]], [[1, 3], [1, 3, 2]])
    assert _step(session, 4) == [*after[-1], 4]


def a_session_and_its_fork() -> None:
    session = _new_session()
    _step(session, 1)
    fork = session.fork()
    assert _at_the_same_time(partial(_step, session, 2), partial(_step, fork, 3)) == [[1, 2], [1, 3]]
    assert [_step(session, 4), _step(fork, 5)] == [[1, 2, 4], [1, 3, 5]]


def a_fork_is_made_during_a_run() -> None:
    session = _new_session()
    _step(session, 1)
    ours, its = _at_the_same_time(partial(_step, session, 2), lambda: _step(session.fork(), 3))
    assert its in ([], [1, 3], [1, 2, 3])
    assert ours in ([1, 2], [])
    assert _step(session, 4) == [1, *ours[1:], 4]


def a_fork_is_reset_during_a_run() -> None:
    session = _new_session()
    _step(session, 1)
    fork = session.fork()
    results = _at_the_same_time(partial(_step, session, 2), lambda: (fork.reset(), _step(fork, 3))[1])
    assert results == [[1, 2], [3]]
    assert [_step(session, 4), _step(fork, 5)] == [[1, 2, 4], [3, 5]]


def another_session_needs_the_room() -> None:
    session = _new_session(7 * BYTES)
    other = _new_session(other=session)
    _step(session, 1)
    ours, its = _at_the_same_time(partial(_step, session, 2), partial(_step, other, 3), refused=ResourceError)
    assert (ours, its) in (([1, 2], [3]), ([1, 2], []), ([], [3]))
    assert _step(session, 4) == [1, *ours[1:], 4]
    assert _step(other, 5) == [*its, 5]


@pytest.mark.parametrize(
    "scenario",
    [
        runs_of_one_session,
        a_session_and_its_fork,
        a_fork_is_made_during_a_run,
        a_fork_is_reset_during_a_run,
        another_session_needs_the_room,
    ],
)
@pytest.mark.parametrize("preemptions", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_schedule_with_few_preemptions(scenario: Callable[[], None], preemptions: int) -> None:
    searched = systematic(scenario, preemptions=preemptions, limit=20_000)
    searched.raise_failure()
    assert searched.exhausted


@pytest.mark.parametrize(
    ("owner", "name", "mistake", "scenario"),
    [
        (Session, "_alone", lambda self: nullcontext(), runs_of_one_session),
        (Session, "_alone", lambda self: nullcontext(), a_fork_is_made_during_a_run),
        (Caches, "is_shared", False, a_session_and_its_fork),
        (Session, "cut_caches", lambda self: self._states.cut(self._length), another_session_needs_the_room),
        (SessionMemory, "wait", lambda self: None, another_session_needs_the_room),
    ],
    ids=["runs overlap", "a fork overlaps", "a fork is written to", "a run is cut", "cutting is taken for a run"],
)
def test_mistakes_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, mistake: object, scenario: Callable[[], None]
) -> None:
    monkeypatch.setattr(owner, name, mistake)
    assert systematic(scenario, preemptions=2, limit=20_000).failed is not None
