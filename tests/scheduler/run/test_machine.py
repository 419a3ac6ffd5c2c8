"""The machine that decides in a run: what is taken first, phases, the end, and that machine code decides the same."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.native import NativeCall
from dagexec.platform.assembly.instructions import A0, RESULT
from dagexec.platform.assembly.native import GeneralAssembler
from dagexec.platform.machine_code import executable
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run import engine
from dagexec.scheduler.run import run as runs
from dagexec.scheduler.run.engine import Bell, NativeRun, Participant, PoolMemory, native_tasks
from dagexec.scheduler.run.engine_layout import Kind, Mode, Outcome, Slot, Task
from dagexec.scheduler.run.machine import Machine, in_order
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.work import Work

needs_machine_code = pytest.mark.skipif(not engine.can_run(), reason="no machine code runs here")

PYTHON = (Kind.PYTHON, Kind.SHORT_PYTHON)


def add_one() -> int | None:
    """The address of a function that adds 1 to a number."""
    code = GeneralAssembler()
    code.set_number(RESULT, 1)
    code.fetch_and_add(RESULT, A0, 0)
    code.clear(RESULT)
    code.end_call()
    return executable(code.code())


def read_number() -> int | None:
    """The address of a function that returns a number."""
    code = GeneralAssembler()
    code.load_field(RESULT, 0)
    code.end_call()
    return executable(code.code())


def tasks_of(parents: list[list[int]], pieces: list[int] | None = None) -> TaskGraph:
    """Tasks, each after its parents."""
    children: list[list[int]] = [[] for _ in parents]
    for task, row in enumerate(parents):
        for parent in row:
            children[parent].append(task)
    return TaskGraph(pieces or [1] * len(parents), children, list(map(len, parents)), range(len(parents)))


def random_tasks(source: random.Random) -> TaskGraph:
    """Up to 200 tasks of up to 5 pieces, with up to 3 parents each."""
    count = source.randrange(1, 200)
    parents = [sorted({source.randrange(task) for _ in range(source.randrange(4))}) if task else []
               for task in range(count)]  # fmt: skip
    return tasks_of(parents, [source.randrange(1, 6) for _ in range(count)])


def test_a_worker_goes_on_with_its_own_task_then_begins_one_and_only_then_joins_others() -> None:
    machine = Machine(tasks_of([[], [], [0, 1]], [3, 1, 2]))
    assert machine.take() == (0, 0)
    assert machine.take() == (1, 0), "a fresh task before a piece of another's"
    machine.end(1)
    assert machine.take(1) == (0, 1), "nothing fresh is left"
    machine.end(0)
    assert machine.take(0) == (0, 2)
    assert machine.take() is None
    machine.end(0)
    assert machine.take(0) is None
    machine.end(0)
    assert machine.take(0) == (2, 0), "a phase begins when all pieces before have ended"
    assert machine.remaining == 1


def test_a_worker_finds_its_own_side_again_in_the_next_task_that_is_cut_alike() -> None:
    machine = Machine(tasks_of([[], [0]], [4, 4]))
    assert machine.take() == (0, 0)
    assert machine.take(from_last=True) == (0, 3)
    assert machine.take(0, from_last=True) == (0, 2)
    assert machine.take(0) == (0, 1)
    assert machine.take(0, from_last=True) is None, "each piece is taken once"
    for _ in range(4):
        machine.end(0)
    assert machine.take(0, from_last=True) == (1, 3), "also if it begins the task"
    assert machine.take(0) == (1, 0)


def test_a_worker_joins_the_first_task_that_others_are_in_whatever_order_they_began_in() -> None:
    machine = Machine(tasks_of([[], [2], [], []], [2, 3, 1, 3]))
    assert [machine.take() for _ in range(3)] == [(0, 0), (2, 0), (3, 0)]
    machine.end(2)
    assert machine.take(2) == (1, 0)
    assert machine.take() == (0, 1), "which has no piece left then"
    assert machine.take() == (1, 1)


def test_nothing_is_taken_of_a_machine_that_was_stopped() -> None:
    machine = Machine(tasks_of([[], [0]], [2, 1]))
    machine.take()
    machine.stop()
    machine.end(0)
    assert (machine.take(0), machine.take(), machine.available) == (None, None, 0)


def test_states_are_equal_where_what_follows_is() -> None:
    one, other = (Machine(tasks_of([[], []])) for _ in range(2))
    for machine in (one, other):
        machine.take()
        machine.take()
    one.end(0)
    other.end(1)
    assert one.state() != other.state()
    one.end(1)
    other.end(0)
    assert one.state() == other.state()


@pytest.mark.parametrize("seed", range(10))
def test_one_worker_ends_every_task_once_and_after_its_parents(seed: int) -> None:
    graph = random_tasks(random.Random(seed))
    order = list(in_order(graph))
    assert sorted(order) == list(range(len(graph.pieces)))
    place = {task: number for number, task in enumerate(order)}
    assert all(place[task] < place[child] for task, row in enumerate(graph.children) for child in row)


class Counting:
    """Tasks whose pieces each add one to a number, some as steps of Python."""

    def __init__(self, graph: TaskGraph, python: frozenset[int] = frozenset()) -> None:
        code = add_one()
        assert code is not None
        source = random.Random(len(graph.pieces))
        self.counts: npt.NDArray[np.int64] = np.zeros(len(graph.pieces), np.int64)
        pieces = [
            source.choice(PYTHON) if task in python else [(_call(code, self.counts, task),)] * count
            for task, count in enumerate(graph.pieces)
        ]
        self.tasks = native_tasks(graph, pieces, [1.0] * len(pieces))

    def work(self, run: NativeRun, worker: int) -> int:
        """Be in the run until it is over; the outcome."""
        me, mode = Participant(run, worker, from_last=worker % 2 == 1), Mode.PICK
        while True:
            outcome = me.enter(mode)
            if outcome == Outcome.PYTHON:
                self.counts[me.calls()] += 1
            elif outcome not in (Outcome.IDLE, Outcome.WAKE):
                return outcome
            mode = {Outcome.PYTHON: Mode.CALLED, Outcome.WAKE: Mode.CONTINUE}.get(Outcome(outcome), Mode.PICK)


def _call(code: int, numbers: npt.NDArray[np.int64], place: int) -> NativeCall:
    address = numbers.ctypes.data + 8 * place
    return NativeCall(code, (address, 0, 0, 0), None, lambda: ValueError("it failed"), numbers)


@needs_machine_code
@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_machine_code_takes_what_the_machine_takes(seed: int, from_last: bool) -> None:
    graph = random_tasks(random.Random(seed))
    machine, taken = Machine(graph), []
    found = machine.take(from_last=from_last)
    while found is not None:
        taken.append(found)
        machine.end(found[0])
        found = machine.take(found[0], from_last=from_last)
    run = Counting(graph).tasks.new_run(traced=True)
    assert Participant(run, from_last=from_last).enter(Mode.PICK) == Outcome.FINISHED
    assert [(task, piece) for task, piece, *_ in run.records()] == taken
    assert min(run.task_seconds()) >= 0 < sum(run.task_seconds())  # clocks of Arm may tick once a microsecond


@pytest.mark.slow
@needs_machine_code
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_execute_every_piece_once_and_one_of_them_ends_the_run(threads: int) -> None:
    source = random.Random(threads)
    pool = PoolMemory()
    with ThreadPoolExecutor(threads) as executor:
        for _ in range(20):
            graph = random_tasks(source)
            python = frozenset(task for task, count in enumerate(graph.pieces) if count == 1)
            counting = Counting(graph, python)
            run = counting.tasks.new_run(traced=True)
            run.belong_to(pool, threads)
            ends = list(executor.map(counting.work, [run] * threads, range(threads)))
            assert counting.counts.tolist() == list(graph.pieces)
            assert sorted(ends) == [Outcome.FINISHED] + [Outcome.OVER] * (threads - 1)
            records = run.records()
            pieces = [(task, piece) for task in set(range(len(graph.pieces))) - python
                      for piece in range(graph.pieces[task])]  # fmt: skip
            assert sorted((task, piece) for task, piece, *_ in records) == sorted(pieces)
            began: dict[int, int] = {}
            ended: dict[int, int] = {}
            for task, _, _, start, end in records:
                began[task], ended[task] = min(began.get(task, start), start), max(ended.get(task, end), end)
            edges = [(task, child) for task in ended for child in graph.children[task] if child in began]
            assert all(ended[task] <= began[child] for task, child in edges)


@needs_machine_code
def test_a_call_that_fails_is_named_and_the_rest_of_its_piece_can_be_done() -> None:
    values = np.array([0, 1, 0, 7], np.int64)
    read = read_number()
    assert read is not None
    calls = tuple(_call(read, values, place) for place in range(4))
    run = native_tasks(tasks_of([[], [0]]), [[calls], [calls[:1]]]).new_run()
    me = Participant(run)
    assert me.enter(Mode.PICK) == Outcome.FAILED
    assert me.failed_call() is calls[1]
    assert not me.continue_piece()
    assert me.failed_call() is calls[3]
    assert me.continue_piece()
    assert me.enter(Mode.DONE) == Outcome.FINISHED


@needs_machine_code
def test_a_run_that_is_stopped_or_interrupted_is_left_between_pieces() -> None:
    counting = Counting(tasks_of([[], [0], [1]]), frozenset([1]))
    run = counting.tasks.new_run()
    me = Participant(run)
    assert me.enter(Mode.PICK) == Outcome.PYTHON
    run.interrupt(True)
    assert me.enter(Mode.CALLED) == Outcome.STOPPED
    run.interrupt(False)
    assert me.enter(Mode.PICK) == Outcome.FINISHED
    run = counting.tasks.new_run()
    run.stop()
    run.interrupt(False)
    assert Participant(run).enter(Mode.PICK) == Outcome.STOPPED


@needs_machine_code
def test_a_run_for_one_worker_that_gives_way_to_another_is_taken_up_again() -> None:
    done = [threading.Event(), threading.Event()]
    counting = Counting(tasks_of([[], [0]], [1, 2]), frozenset([0]))

    def outrun() -> None:
        pool.submit(urgent)

    work = Work(counting.tasks.graph, [((outrun,),), ()], counting.tasks)
    low = runs.Run("low", work, lambda _chain, _step: "it", done[0].set)
    urgent = runs.task("urgent", lambda: None, priority=1)
    low.width, urgent.finished = 1, done[1].set
    with WorkerPool(1) as pool:
        pool.submit(low)
        assert all(one.wait(30) for one in done)
    assert counting.counts.tolist() == [0, 2]


@needs_machine_code
def test_who_leaves_more_behind_than_it_takes_says_so_while_a_worker_sleeps() -> None:
    counting = Counting(tasks_of([[]], [3]))
    run, pool = counting.tasks.new_run(), PoolMemory()
    run.belong_to(pool, 2)
    run.active(1)
    pool.tell(1, False)
    me = Participant(run)
    assert me.enter(Mode.PICK) == Outcome.WAKE
    assert counting.counts.tolist() == [0]
    pool.tell(0, False)
    assert me.enter(Mode.CONTINUE) == Outcome.FINISHED
    assert counting.counts.tolist() == [3]
    run.ticks()[:] = 1  # whatever it took: the machine may be busy
    counting.tasks.learn(run)
    short = counting.tasks.new_run()
    short.belong_to(pool, 2)
    pool.tell(1, False)
    assert Participant(short).enter(Mode.PICK) == Outcome.FINISHED, "nobody is woken for what is done before"


@needs_machine_code
@pytest.mark.parametrize(
    ("pieces", "seconds", "expected"),
    [
        ([2, 1, 2], [20e-6, 20e-6, 25e-6], [45, 45, 25]),
        ([2, 1, 2], [20e-6, 200e-6, 25e-6], [20, 225, 25]),
        ([1, 1, 1], [20e-6, 20e-6, 25e-6], [20, 20, 25]),
    ],
    ids=["shared, alone, shared", "alone for too long", "alone"],
)
def test_a_worker_is_woken_for_what_it_will_find_along_the_way(
    pieces: list[int], seconds: list[float], expected: list[int]
) -> None:
    graph = tasks_of([[], [0], [1]], pieces)
    tasks = native_tasks(graph, [[()] * count for count in pieces], seconds)
    ticks = tasks.rows(tasks.new_run()._state)[:, Task.EXPECTED]
    np.testing.assert_allclose(ticks * engine.seconds_per_tick() * 1e6, expected, atol=0.1)


@needs_machine_code
def test_a_thread_that_signals_come_to_looks_for_them_between_pieces() -> None:
    counting = Counting(tasks_of([[]], [3]))
    run = counting.tasks.new_run()
    me = Participant(run)
    me._slot[Slot.UNTIL] = 1  # on a clock that began long ago
    assert me.enter(Mode.PICK) == Outcome.LOOK
    assert Participant(run, looks=True).enter(Mode.PICK) == Outcome.FINISHED


@needs_machine_code
@pytest.mark.parametrize("call", ["rung", "the pool is full"])
def test_a_worker_listens_until_it_is_called_or_there_is_no_place_for_it(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_spins", lambda: 1 << 40)
    monkeypatch.setattr(engine, "_GRACE", 0)
    pool = PoolMemory()
    bell = Bell(pool)
    listening = threading.Thread(target=bell.listen, daemon=True)
    listening.start()
    bell.ring() if call == "rung" else pool.tell(0, False, full=True)
    listening.join(30)
    assert not listening.is_alive()


@needs_machine_code
def test_a_helper_leaves_the_end_of_a_run_to_its_caller_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_spins", lambda: 1 << 40)
    monkeypatch.setattr(engine, "_GRACE", 1)
    counting = Counting(tasks_of([[]], [1]))
    run = counting.tasks.new_run()
    helper = Participant(run, helps=True)
    helping = threading.Thread(target=helper.enter, args=(Mode.PICK,), daemon=True)
    helping.start()
    while run.remaining:
        pass
    assert Participant(run, stays=True).enter(Mode.PICK) == Outcome.OVER
    assert helping.is_alive()
    for _ in range(3000):  # it counts down the number itself, and may write over what it is set to
        helper._slot[Slot.GRACE] = 0
        helping.join(0.01)
        if not helping.is_alive():
            break
    assert not helping.is_alive()


@needs_machine_code
def test_of_two_in_a_run_one_leaves_for_a_run_that_waits() -> None:
    counting = Counting(tasks_of([[]], [3]))
    run, pool = counting.tasks.new_run(), PoolMemory()
    run.belong_to(pool, 2)
    run.active(2)
    pool.tell(0, True)
    assert Participant(run).enter(Mode.PICK) == Outcome.IDLE
    assert Participant(run, stays=True).enter(Mode.PICK) == Outcome.FINISHED
