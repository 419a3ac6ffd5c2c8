"""One wait, record, mutex or dependency less: whatever was needed is found by the proof and by the detector."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dagexec
from dagexec import NetDef, Workspace
from dagexec.core.device import CPU, Device
from dagexec.core.exclusive import StreamMutex, TurnLock
from dagexec.core.stream import Priority, Stream
from dagexec.devices.sim import SimStream, simulated
from dagexec.errors import DagexecError, DeviceError, OperatorError
from dagexec.scheduler.hazards import Detector, check_net
from dagexec.scheduler.nets.options import RunOptions
from tests.nets import net_of, noop_nets
from tests.planted.plans import (
    Conflicts,
    Mutant,
    MutantNet,
    Outcome,
    StreamPerChain,
    conflicts_of,
    holds_in,
    is_ordered_naively,
    mutants_of,
    orders_of,
    try_mutant,
    waits_in_vain,
)
from tests.planted.zoo import CASES, Case, mutant_net
from tests.scheduler.nets.test_results import INPUTS, SHAPE, arithmetic_nets

SIM, OTHER = Device("sim", 0), Device("sim", 1)
DIAMONDS: list[list[int]] = [[], [0], [0], [1, 2], [3], [3], [4, 5]]


def on_devices(net: NetDef, devices: Sequence[Device]) -> NetDef:
    """A copy of `net` whose operators are on `devices`, in turn."""
    placed = NetDef()
    placed.CopyFrom(net)
    for index, definition in enumerate(placed.op):
        definition.device_option.CopyFrom(devices[index % len(devices)].to_option())
    return placed


@contextmanager
def running(definition: NetDef, workspace: Workspace | None = None, workers: int = 2) -> Iterator[MutantNet]:
    with (
        simulated([SIM, OTHER]),
        MutantNet(definition, workspace or Workspace(), num_workers=workers) as net,
    ):
        yield net


def with_blobs() -> Workspace:
    """The blobs that `noop_nets` may read before it writes them."""
    workspace = Workspace()
    for index in range(7):
        workspace.feed_blob(f"b{index}", np.ones(3, np.float32))
    return workspace


def all_outcomes(net: MutantNet, every: int = 1) -> list[Outcome]:
    """Every mutant of `net`, or each `every`-th, tried; after a look at the net, which must be found to be in order."""
    conflicts = conflicts_of(net)
    assert check_net(net).holds
    detector = Detector()
    net.run(trace=detector)
    assert detector.races == []
    return [try_mutant(net, mutant, conflicts) for mutant in itertools.islice(mutants_of(net), 0, None, every)]


def assert_all_found(outcomes: Sequence[Outcome]) -> None:
    """What was needed is found by both, and nothing else by either."""
    for outcome in outcomes:
        what = f"{outcome.mutant.kind} {outcome.mutant.what}"
        assert outcome.disproved == outcome.needed, f"{what}: {outcome.proof.unordered}"
        assert outcome.detected == outcome.needed, f"{what}: {outcome.races} {outcome.error}"
        if outcome.mutant.kind == "record" and outcome.needed:
            assert isinstance(outcome.error, OperatorError)
            assert "never recorded" in str(outcome.error)
        elif outcome.needed:
            assert outcome.races, what


def always_in_order(mutant: Mutant, conflicts: tuple[Conflicts, Conflicts], streams: int) -> bool:
    """True when all conflicts are settled in every launch order and every assignment of chains to `streams`."""
    plan = mutant.plan
    numbers = range(len(plan.chains))
    for launch_order in itertools.permutations(numbers):
        place = {chain: position for position, chain in enumerate(launch_order)}
        if all(place[chain] < place[child] for chain in numbers for child in plan.children[chain]):
            for stream in itertools.product(range(streams), repeat=len(numbers)):
                after = orders_of(plan, mutant.synchronization, launch_order, stream)
                if not holds_in(mutant, conflicts, after):
                    return False
    return not waits_in_vain(mutant)


@given(noop_nets(most=5), st.lists(st.sampled_from((SIM, SIM, OTHER, CPU)), min_size=1, max_size=3))
@settings(max_examples=12, deadline=None)
def test_what_is_needed_with_a_stream_for_every_chain_is_needed_with_two_streams(
    definition: NetDef, devices: list[Device]
) -> None:
    """The judge of the other tests, against all schedules of nets of a few chains."""
    with running(on_devices(definition, devices), with_blobs()) as net:
        if len(net.plan.chains) > 5:
            return
        conflicts = conflicts_of(net)
        for mutant in mutants_of(net):
            if mutant.kind != "lost record":
                assert always_in_order(mutant, conflicts, 2) == is_ordered_naively(mutant, conflicts), mutant.what


@pytest.mark.slow
@given(noop_nets(), st.lists(st.sampled_from((SIM, OTHER, CPU)), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_every_mutant_of_a_random_net_is_found_exactly_when_it_lacks_something(
    definition: NetDef, devices: list[Device]
) -> None:
    with running(on_devices(definition, devices), with_blobs()) as net:
        assert_all_found(all_outcomes(net))


@pytest.mark.slow
@given(arithmetic_nets(), st.lists(st.sampled_from((SIM, OTHER, CPU)), min_size=1, max_size=4))
@settings(max_examples=10, deadline=None)
def test_the_same_for_operators_that_compute_with_views_and_in_place(definition: NetDef, devices: list[Device]) -> None:
    workspace = Workspace()
    for name in INPUTS:
        workspace.feed_blob(name, np.ones(SHAPE, np.float32))
    with simulated([SIM, OTHER]):
        try:
            net = MutantNet(on_devices(definition, devices), workspace, num_workers=2)
            net.prepared()
        except DagexecError:
            return  # a net that no runtime takes
        with net:
            assert_all_found(all_outcomes(net))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.every], ids=lambda case: case.name)
def test_every_mutant_of_a_model_that_lacks_something_is_found(case: Case) -> None:
    with mutant_net(case) as net:
        outcomes = all_outcomes(net, case.every)
    assert_all_found(outcomes)
    needed = [outcome for outcome in outcomes if outcome.needed]
    kinds = {outcome.mutant.kind for outcome in needed}
    assert {"wait", "record", "lost record", "dependency"} <= kinds
    assert len(needed) >= 20


def conv_net(branches: int = 4, **arguments: int | str) -> NetDef:
    """Convolutions side by side, of a copy of x, and their sum."""
    net = NetDef(name="branches", external_input=["x", "w"])
    net.op.add(type="Copy", input=["x"], output=["c"])
    for index in range(branches):
        definition = net.op.add(type="Conv", input=["c", "w"], output=[f"y{index}"])
        definition.arg.add(name="kernel", i=3)
        for name, value in arguments.items():
            if isinstance(value, str):
                definition.engine = value
            else:
                definition.arg.add(name=name, i=value)
    net.op.add(type="Sum", input=[f"y{index}" for index in range(branches)], output=["z"])
    return net


@contextmanager
def convolutions(device: Device, **arguments: int | str) -> Iterator[MutantNet]:
    random = np.random.default_rng(0)
    with simulated():
        workspace = Workspace()
        workspace.feed_blob("x", random.standard_normal((1, 4, 12, 12)).astype(np.float32), device=str(device))
        workspace.feed_blob("w", random.standard_normal((4, 4, 3, 3)).astype(np.float32), device=str(device))
        dagexec.create_shared_buffer(workspace, device)
        with MutantNet(on_devices(conv_net(**arguments), [device]), workspace, num_workers=2) as net:
            yield net


BUFFER: dict[str, int | str] = {"shared_buffer": 1}
STATE: dict[str, int | str] = {"engine": "CUDNN", "cudnn_state": 1}


@pytest.mark.parametrize("arguments", [BUFFER, STATE, BUFFER | STATE], ids=["buffer", "state", "both"])
def test_every_mutant_of_convolutions_that_take_turns_is_found(arguments: dict[str, int | str]) -> None:
    with convolutions(SIM, **arguments) as net:
        outcomes = all_outcomes(net)
    assert_all_found(outcomes)
    guards = [outcome for outcome in outcomes if outcome.mutant.kind == "guard"]
    assert len(guards) == (8 if len(arguments) == 3 else 4)
    assert any(outcome.needed for outcome in guards) or len(arguments) == 3


def races_with_a_stream_for_every_chain(net: MutantNet) -> set[str]:
    """The resources of the races in one run."""
    detector = Detector()
    net.prepared()
    own, net.streams = net.streams, StreamPerChain(net.name, 1, Priority.NORMAL)
    try:
        net.run(trace=detector, timeout=60)
    except OperatorError as error:
        if not isinstance(error.__cause__, DeviceError):  # which has noticed, too
            raise
    finally:
        net.streams.give_back()
        net.streams = own
    return {race.resource for race in detector.races}


def forget_locks(patch: pytest.MonkeyPatch) -> None:
    """Turns and states are used without the lock of the host."""
    patch.setattr(TurnLock, "__enter__", lambda _lock: None)
    patch.setattr(TurnLock, "__exit__", lambda _lock, *_error: None)


def forget_waits(patch: pytest.MonkeyPatch) -> None:
    """No stream follows an event."""
    patch.setattr(SimStream, "follow", lambda _stream, _event: None)


def forget_records(patch: pytest.MonkeyPatch) -> None:
    """Nobody knows the event of the turn before."""
    turn = StreamMutex.turn

    @contextmanager
    def forgetting(mutex: StreamMutex, stream: Stream) -> Iterator[Stream]:
        with turn(mutex, stream) as same:
            yield same
        mutex._ends.clear()

    patch.setattr(StreamMutex, "turn", forgetting)


def forget_ends(patch: pytest.MonkeyPatch) -> None:
    """The user of a library state does not wait for it."""
    wait = SimStream.wait
    patch.setattr(SimStream, "wait", lambda self, event: None if "after turn" in event.owner else wait(self, event))


Forget = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("forget", [forget_locks, forget_waits, forget_records])
def test_turns_that_lack_their_lock_their_wait_or_their_record_are_found_at_run_time(
    forget: Forget, monkeypatch: pytest.MonkeyPatch
) -> None:
    with convolutions(SIM, shared_buffer=1) as net:
        assert races_with_a_stream_for_every_chain(net) == set()
        with monkeypatch.context() as patch:
            forget(patch)
            assert races_with_a_stream_for_every_chain(net) == {"shared buffer of sim:0"}


@pytest.mark.parametrize(
    ("forget", "resources"),
    [
        (forget_locks, {"library state 1 of sim:0"}),
        (forget_waits, {"blob 'c'"}),
        (forget_ends, {"blob 'y0'", "blob 'y1'", "blob 'y2'", "blob 'y3'"}),
    ],
)
def test_library_states_that_lack_their_lock_or_an_event_are_found_at_run_time(
    forget: Forget, resources: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with convolutions(SIM, engine="CUDNN", cudnn_state=1) as net:
        assert races_with_a_stream_for_every_chain(net) == set()
        with monkeypatch.context() as patch:
            forget(patch)
            found = races_with_a_stream_for_every_chain(net)
            if forget is forget_ends:
                found.discard("the results")  # the run may end before the state's stream does, and that is found too
            assert found == resources


def test_without_the_lock_of_the_hosts_shared_buffer_its_users_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with convolutions(CPU, shared_buffer=1) as net:
        assert races_with_a_stream_for_every_chain(net) == set()
        with monkeypatch.context() as patch:
            forget_locks(patch)
            assert races_with_a_stream_for_every_chain(net) == {"shared buffer of cpu"}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("device", [SIM, CPU])
def test_a_missing_dependency_is_found_whatever_the_schedule_was(device: Device, workers: int, streams: int) -> None:
    """With one worker and one stream all is in order by chance."""
    with (
        simulated(seed=0),
        MutantNet(
            on_devices(net_of(DIAMONDS), [device]),
            Workspace(),
            num_workers=workers,
            options=RunOptions(streams_per_worker=streams),
        ) as net,
    ):
        for mutant in mutants_of(net):
            if mutant.kind == "dependency":
                detector = Detector()
                original = net.prepared()
                kept = original.plan
                net.mutant = mutant
                net.run(trace=detector)
                net.mutant, original.plan = None, kept
                assert detector.races, mutant.what
