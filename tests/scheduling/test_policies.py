"""Policies in predictions, runs and explored schedules: one order everywhere, the same bytes, and errors with names."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import dagexec
from dagexec.core.graph import build_graph
from dagexec.errors import PolicyError, SettingError
from dagexec.options import CompileOptions
from dagexec.scheduler.exploration import explore_seeds
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.plan.plan import Plan, build_plan, with_policy
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run import engine
from dagexec.scheduler.run.engine import NativeRun
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduler.run.policy_machine import PolicyMachine, machine_of
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.prediction import Hardware, TimedTasks, predict_device, predict_host, predict_makespan
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.work import chain_work
from dagexec.scheduling import Chains, Fifo, Heft, Policy, RandomOrder, RunState, find_policy, policy_names
from dagexec.testing import random_feeds
from dagexec.tracing import Trace
from tests.nets import net_of
from tests.scheduler.scenarios import DIAMOND, Done, expected, fed, outputs_of, sums

NAMES = policy_names()
WIDE = [[], [0], [0], [0], [1, 2], [2, 3], [4, 5], []]


def random_parents(source: random.Random, most: int = 25) -> list[list[int]]:
    """Of up to `most` operators, with up to three each."""
    return [sorted({source.randrange(child) for _ in range(source.randrange(4))}) if child else []
            for child in range(source.randint(1, most))]  # fmt: skip


def plan_of(parents: Sequence[Sequence[int]], policy: Policy | str, workers: int, seed: int = 0) -> Plan:
    """Each operator a chain, of random seconds."""
    source = random.Random(seed)
    seconds = [float(source.randint(1, 9)) for _ in parents]
    plan = build_plan(build_graph(net_of(parents, "sums")), seconds, [(index,) for index in range(len(parents))])
    return with_policy(plan, find_policy(policy), workers)


def run_of(plan: Plan, step: Callable[[int], object], finished: Callable[[], object]) -> Run:
    """A run that calls `step` with the operator of each chain."""
    work = chain_work(plan, [(partial(step, chain[0]),) for chain in plan.chains])
    return Run("sums", work, lambda chain, _step: f"operator {chain}", finished)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_one_worker_of_a_pool_runs_operators_in_the_order_that_is_predicted(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(random_parents(random.Random(seed)), name, 1, seed)
    predicted: list[int] = []
    end = Machine.end

    def recorded(machine: Machine, task: int, piece: int = -1) -> None:
        predicted.append(plan.chains[task][0])
        end(machine, task, piece)

    with monkeypatch.context() as patch:
        patch.setattr(Machine, "end", recorded)
        predict_makespan(plan, 1)
    ran: list[int] = []
    done = threading.Event()
    run = run_of(plan, ran.append, done.set)
    with WorkerPool(1) as pool:
        pool.submit(run)
        assert done.wait(30)
    run.raise_error()
    assert ran == predicted
    assert sorted(ran) == list(range(len(ran)))


def test_policies_differ_in_the_order_that_they_give() -> None:
    orders = set()
    for name in NAMES:
        plan = plan_of(WIDE, name, 1)
        machine, order = machine_of(TaskGraph([1] * 8, plan.children, plan.parent_counts, range(8), plan.policy)), []
        while (found := machine.take()) is not None:
            order.append(plan.chains[found[0]][0])
            machine.end(*found)
        orders.add(tuple(order))
    assert len(orders) >= 5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("net_type", ["dag", "async_dag"])
def test_bytes_are_those_of_simple_net_under_every_policy(name: str, net_type: str) -> None:
    for seed in range(4):
        net = sums(random_parents(random.Random(seed)))
        right = expected(net)
        workspace = fed()
        with workspace.create_net(net, net_type, 3, policy=name) as made:  # type: ignore[attr-defined]
            for _ in range(2):
                made.run()
                assert outputs_of(workspace, net) == right


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", ["zoo:lenet", pytest.param("zoo:resnet20", marks=pytest.mark.slow)])
def test_a_bundled_model_has_the_same_bytes_also_observed_and_on_a_simulated_device(name: str, source: str) -> None:
    model = dagexec.load_model(source)
    feeds = random_feeds(model)
    with dagexec.compile(model, net_type="simple", optimize=False) as executor:
        right = executor.run(feeds)
    for device in ("cpu", "sim:0"):
        with dagexec.compile(model, policy=name, num_workers=2, device=device, optimize=False) as executor:
            for trace in (None, Trace()):
                found = executor.run(feeds, trace=trace)
                assert {output: array.tobytes() for output, array in found.items()} == {
                    output: array.tobytes() for output, array in right.items()
                }


def test_priorities_run_in_machine_code_and_choices_do_not() -> None:
    kinds = {}
    for policy in ("random", "fifo"):
        workspace = fed()
        made = workspace.create_net(sums(DIAMOND), "dag", 2, policy=policy)
        assert isinstance(made, BaseNet)
        with made:
            kinds[policy] = type(made.new_run(lambda: None).machine)
    assert (kinds["random"] is NativeRun) == engine.can_run()
    assert kinds["fifo"] is PolicyMachine


class InFewPieces(Policy):
    """Shares the operators of every chain into so many pieces at most."""

    most = 1

    def order(self, chains: Chains) -> Sequence[int]:
        return range(len(chains.names))

    def pieces(self, chains: Chains) -> Sequence[int]:
        return [self.most] * len(chains.names)


class InFewPiecesFirstReady(InFewPieces):
    """Likewise, and decides in the run."""

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        return ready[0]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [InFewPieces, InFewPiecesFirstReady])
def test_a_policy_limits_the_pieces_of_operators_and_no_byte_changes(policy: type[InFewPieces]) -> None:
    model = dagexec.load_model("zoo:squeezenet")
    feeds = random_feeds(model)
    pieces, results = [], []
    for most in (100, 2, 1):
        made = policy()
        made.most = most
        with dagexec.compile(model, policy=made, num_workers=2) as executor:
            for trace in (None, Trace()):
                found = executor.run(feeds, trace=trace)
                results.append({name: array.tobytes() for name, array in found.items()})
            net = executor.net()
            pieces.append(max(net.work(net.prepared()).graph.pieces))
    assert pieces[0] > 2
    assert pieces[1:] == [2, 1]
    assert all(found == results[0] for found in results)


class Waiting(Policy):
    """Never begins the last chain."""

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        return next((chain for chain in ready if chain != 3), None)


class Twice(Policy):
    """Hands out the first chain again."""

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        return 0


class TooEarly(Policy):
    """Begins with the end."""

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        return 3


class Nonsense(Policy):
    """Answers in words."""

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        return "the first"  # type: ignore[return-value]


class Failing(Policy):
    """Divides by nothing."""

    name = "failing"

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        return 1 // 0


class Unready(Policy):
    """Fails before it begins."""

    def begin(self, chains: Chains) -> None:
        raise ValueError("no luck")

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        return ready[0]


class Forgetful(Policy):
    """Leaves a chain out of its order."""

    def order(self, chains: Chains) -> Sequence[int]:
        return [0, 1, 2]


class Repeating(Policy):
    """Has a chain twice."""

    def order(self, chains: Chains) -> Sequence[int]:
        return [0, 1, 1, 2]


class NoPieces(InFewPieces):
    """Lets the first chain have none."""

    most = 0


class TooFewLimits(InFewPieces):
    """Forgets one."""

    def pieces(self, chains: Chains) -> Sequence[int]:
        return [2, 2, 2]


WRONG: list[tuple[type[Policy], str, int | None]] = [
    (Waiting, "lets all workers wait for nothing and never begins it", 3),
    (Twice, "hands it out twice", 0),
    (TooEarly, "chooses it while it waits for", 3),
    (Nonsense, "chooses 'the first'; chains have the numbers 0 to 3", None),
    (Failing, "failed in choose: ZeroDivisionError", None),
    (Unready, "failed in begin: ValueError: no luck", None),
    (Forgetful, "forgets it in its order", 3),
    (Repeating, "has it twice in its order", 1),
    (NoPieces, "lets it have 0 pieces", 0),
    (TooFewLimits, "limits the pieces of 3 chains; there are 4", None),
]


@pytest.mark.parametrize(("policy", "what", "chain"), WRONG)
def test_a_wrong_policy_is_named_by_a_prediction_and_by_a_run(
    policy: type[Policy], what: str, chain: int | None
) -> None:
    def predict() -> None:
        predict_makespan(plan_of(DIAMOND, policy(), 2), 2)

    def run() -> None:
        with fed().create_net(sums(DIAMOND), "dag", 2, policy=policy) as made:  # type: ignore[attr-defined]
            made.run()

    def serve() -> None:
        with dagexec.compile(sums(DIAMOND), policy=policy, num_workers=2, optimize=False) as executor:
            executor.run({"x": np.ones((2, 3), np.float32)})

    for attempt in (predict, run, serve):
        with pytest.raises(PolicyError) as caught:
            attempt()
        assert what in str(caught.value)
        assert caught.value.net == "sums"
        assert caught.value.policy == (policy.name or policy.__name__)
        assert caught.value.chain == chain
        assert chain is None or f"chain {chain} (from " in str(caught.value)


def test_a_net_runs_again_after_its_policy_went_wrong_in_one_run() -> None:
    class Moody(Fifo):
        wrong = True

        def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int:
            if Moody.wrong:
                raise ValueError("not now")
            return super().choose(ready, worker, state)

    net, workspace = sums(DIAMOND), fed()
    with workspace.create_net(net, "dag", 2, policy=Moody) as made:  # type: ignore[attr-defined]
        with pytest.raises(PolicyError):
            made.run()
        Moody.wrong = False
        made.run()
        assert outputs_of(workspace, net) == expected(net)


def pool_scenario(
    parents: Sequence[Sequence[int]], policy: Policy | str, workers: int, threads: int
) -> Callable[[], None]:
    """One run of a plan for so many workers on a pool of so many threads; fails unless each operator runs once."""
    plan = plan_of(parents, policy, workers)

    def scenario() -> None:
        order: list[int] = []
        done = Done()
        with WorkerPool(threads) as pool:
            run = run_of(plan, order.append, done)
            pool.submit(run)
            done.wait()
        run.raise_error()
        assert sorted(order) == list(range(len(parents)))
        assert all(order.index(parent) < order.index(child) for child, row in enumerate(parents) for parent in row)
        assert done.told == 1

    return scenario


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("workers", "threads"), [(2, 2), (2, 3), (3, 1)])
def test_no_schedule_of_threads_loses_a_chain_or_a_wake_up(name: str, workers: int, threads: int) -> None:
    result = explore_seeds(pool_scenario(WIDE, name, workers, threads), range(15))
    assert result.failed is None, result.failed


class Lockstep(Policy):
    """Lets worker 1 wait until worker 0 does something, and never begins anything alone."""

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        return ready[0] if worker == 0 or 0 in state.running.values() else None


class Starving(Policy):
    """Keeps one chain back while another runs, and then for ever."""

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        return next((chain for chain in ready if chain != 4), None)


def test_workers_that_a_policy_lets_wait_are_woken_and_starvation_is_found() -> None:
    result = explore_seeds(pool_scenario(WIDE, Lockstep(), 2, 2), range(40))
    assert result.failed is None, result.failed
    starved = explore_seeds(pool_scenario(WIDE, Starving(), 2, 2), range(3))
    assert starved.failed is not None
    assert isinstance(starved.failed.failure, PolicyError)


def test_a_run_has_something_to_take_again_only_when_what_lets_workers_wait_has_ended() -> None:
    plan = with_policy(build_plan(build_graph(net_of([[], [], []])), [1.0] * 3, [(0,), (1,), (2,)]), OneAtATime(), 2)
    machine = machine_of(TaskGraph([1] * 3, plan.children, plan.parent_counts, range(3), plan.policy))
    assert machine.take() == (0, 0)
    assert machine.available == 2, "nobody has asked yet"
    assert machine.take() is None
    assert machine.available == 0, "else a worker would come in vain, again and again"
    machine.end(0, 0)
    assert machine.available == 2
    machine.stop()
    assert (machine.take(), machine.available) == (None, 0)


class OneAtATime(Policy):
    """Lets nobody begin beside another."""

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        return ready[0] if not state.running else None


class Recording(Policy):
    """The oldest, noting who was asked, and who had released what was ready."""

    def begin(self, chains: Chains) -> None:
        self.asked: list[tuple[int, int, tuple[int, ...]]] = []

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        self.asked.append((worker, ready[0], tuple(state.released_by[chain] for chain in ready)))
        return ready[0]


def test_a_thread_goes_on_as_the_worker_that_it_was_and_releases_chains_as_that() -> None:
    plan = with_policy(build_plan(build_graph(net_of([[], [], [1], [1]])), [1.0] * 4, [(0,), (1,), (2,), (3,)]),
                       Recording(), 2)  # fmt: skip
    zero, one = (next(number for number, chain in enumerate(plan.chains) if chain == (index,)) for index in (0, 1))
    machine = machine_of(TaskGraph([1] * 4, plan.children, plan.parent_counts, range(4), plan.policy))
    taken = [machine.take(), machine.take()]
    assert taken == [(one, 0), (zero, 0)], "chain 1 is the more urgent"
    machine.end(one, 0)
    machine.end(zero, 0)
    machine.take(zero)
    machine.take(one)
    assert plan.policy is not None
    recording = plan.policy.begun(2)
    assert isinstance(recording, Recording)
    asked = [(worker, released) for worker, _, released in recording.asked]
    assert asked == [(0, (-1, -1)), (1, (-1,)), (1, (0, 0)), (0, (0,))]


def test_workers_that_wait_share_the_pieces_of_a_task() -> None:
    plan = plan_of([[], []], OneAtATime(), 2)
    graph = TaskGraph([4, 1], plan.children, plan.parent_counts, range(2), plan.policy)
    # both do two of the four pieces, and only then the other begins
    assert predict_host(TimedTasks(graph, [8.0, 3.0]), Hardware(2)) == 7.0


def test_the_tasks_of_a_chain_that_has_begun_go_on_before_another_is_chosen() -> None:
    plan = plan_of([[], []], "lifo", 1)
    graph = TaskGraph([1, 3, 1, 1], [[1], [2], [], []], [0, 1, 1, 0], [0, 0, 0, 1], plan.policy)
    machine, order = machine_of(graph), []
    last = -1
    while (found := machine.take(last)) is not None:
        order.append(found)
        machine.end(*found)
        last = found[0]
    assert order == [(3, 0), (0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert machine.remaining == 0


def test_a_placement_waits_for_its_worker_where_a_list_would_not() -> None:
    class Pinned(Policy):
        def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
            return next((chain for chain in ready if chain % 2 == worker), None)

    plan = build_plan(build_graph(net_of([[], [], []])), [4.0, 3.0, 2.0], [(0,), (1,), (2,)])
    assert predict_makespan(with_policy(plan, Pinned(), 2), 2) == 6.0, "0 and 2 on one worker"
    assert predict_makespan(plan, 2) == 5.0


@pytest.mark.parametrize("name", NAMES)
def test_launches_on_streams_are_predicted_under_a_policy(name: str) -> None:
    plan = plan_of(WIDE, name, 2)
    seconds = [1.0] * len(WIDE)
    found = predict_device(plan, Hardware(2, 2, launch_seconds=0.1), seconds)
    assert 3.0 < found <= 8.0 + 0.8


def test_names_are_found_by_the_entry_point_group_and_unknown_ones_are_told_what_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_policies.py").write_text(
        "from dagexec.scheduling import Fifo\nclass Own(Fifo):\n    name = 'own'\n"
    )
    info = tmp_path / "own_policies-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-policies\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[dagexec.policies]\nown = own_policies:Own\nlost = own_policies:Lost\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert type(find_policy("own")).__name__ == "Own"
    assert {"own", "heft"} <= set(policy_names())
    with pytest.raises(SettingError, match="of own-policies 1 is skipped: own_policies:Lost: AttributeError"):
        find_policy("lost")
    with pytest.raises(SettingError, match=r"unknown; expected one of critical_path, .* did you mean 'heft'"):
        find_policy("hefd")
    sys.modules.pop("own_policies", None)


@pytest.mark.parametrize(
    ("given", "message"),
    [(3, "expected a name or"), (Policy, "neither an `order` nor a `choose`"), (int, "expected a name or")],
)
def test_what_is_no_policy_is_refused(given: object, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        find_policy(given)


def test_a_policy_is_given_by_name_class_or_object_and_not_where_it_would_decide_nothing() -> None:
    assert type(CompileOptions(policy="heft").policy) is Heft
    assert type(CompileOptions(policy=Heft).policy) is Heft
    seeded = RandomOrder(7)
    assert CompileOptions(policy=seeded).policy is seeded
    with pytest.raises(SettingError, match="not 'simple'"):
        CompileOptions(policy="heft", net_type="simple")
    with pytest.raises(SettingError, match="capture"):
        CompileOptions(policy="heft", device="sim:0", capture=True)
    with pytest.raises(SettingError, match="dag and async_dag"):
        fed().create_net(sums(DIAMOND), "simple", policy="heft")
