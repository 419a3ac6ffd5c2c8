"""Stress: what the random nets contain, that a case follows from its seed, and that planted defects are found."""

import dataclasses
import json
import os
import random
import re
import shlex
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.binding.io_binding import Array, Outputs
from dagexec.binding.replicas import Replica
from dagexec.core.graph import Graph, build_graph
from dagexec.core.shared_buffer import create_shared_buffer
from dagexec.errors import DeviceError, OperatorError, SchemaError
from dagexec.platform.timer_thread import THREAD_NAME
from dagexec.scheduler.memory import list_order
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.plan import preparation
from dagexec.scheduler.plan.plan import Plan, build_plan
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.stress.case import NET_TYPES, Case, make_case
from dagexec.stress.nets import RandomNet, RandomNetOptions, features_of, random_net, without_devices
from dagexec.stress.operators import FAILING_OPERATOR, Failure, InjectedError
from dagexec.stress.runner import CaseFailedError, differences, run_case
from tests.command_line import Cli
from tests.ops.running import operator_def

SEEDS = range(150)
THREE_DEVICES = ("cpu", "sim:0", "sim:1")


def drawn(seed: int, **options: object) -> RandomNet:
    return random_net(random.Random(seed), RandomNetOptions(**options))  # type: ignore[arg-type]


def run_simple(net: RandomNet, number: int, failures: dict[int, Failure] | None = None) -> Outputs:
    workspace = Workspace()
    create_shared_buffer(workspace)
    for name, array in {**net.parameters, **net.feeds(number, failures)}.items():
        workspace.feed_blob(name, array)
    with SimpleNet(without_devices(net.net), workspace) as simple:
        simple.run()
    return {name: workspace.fetch_blob(name) for name in net.outputs}


@pytest.mark.slow
@pytest.mark.parametrize("stateful", [False, True])
def test_every_random_net_runs_and_its_results_are_finite(stateful: bool) -> None:
    for seed in SEEDS:
        net = drawn(seed, stateful=stateful)
        for number in range(2):
            for name, array in run_simple(net, number).items():
                assert np.isfinite(array).all(), f"seed {seed}, blob {name}"


def test_a_seed_gives_the_same_net_and_feeds_every_time() -> None:
    for seed in SEEDS:
        one, other = drawn(seed), drawn(seed)
        assert one.net == other.net
        assert (one.inputs, one.outputs, one.batches) == (other.inputs, other.outputs, other.batches)
        for mine, theirs in ((one.parameters, other.parameters), (one.feeds(1), other.feeds(1))):
            assert not differences(dict(mine), dict(theirs))
    assert drawn(0).net != drawn(1).net


@pytest.mark.slow
def test_a_seed_gives_the_same_net_in_another_process() -> None:
    program = "import dagexec.stress.case as c; print(c.make_case(7).net().net, c.make_case(7))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert printed.stdout == f"{make_case(7).net().net} {make_case(7)}\n"


def test_every_feature_appears_within_150_seeds() -> None:
    found: Counter[str] = Counter()
    for seed in SEEDS:
        for name, count in drawn(seed, devices=THREE_DEVICES).features.items():
            found[name] += count > 0
    assert set(found) == {
        "operators", "blobs with several writers", "write-after-read edges", "write-after-write edges", "views",
        "failing operators", "nets on several devices", "operators on cpu", "operators on sim:0", "operators on sim:1",
        "in-place writes", "control edges", "convolutions", "convolutions on the shared buffer",
        "operators with a library state", "operators with shapes from values", "operators in pieces",
    }  # fmt: skip
    assert min(found.values()) >= 15, found


def test_nets_are_deep_wide_and_empty_of_neither() -> None:
    graphs = [build_graph(drawn(seed).net) for seed in SEEDS]
    depths, sizes = [_longest_path(graph) for graph in graphs], [len(graph) for graph in graphs]
    assert min(sizes) == 1
    assert max(sizes) >= 45
    assert any(depth >= 25 for depth in depths)
    assert any(size >= 40 and depth <= size // 3 for size, depth in zip(sizes, depths, strict=True))


def _longest_path(graph: Graph) -> int:
    depth: list[int] = []
    for parents in graph.parents:
        depth.append(1 + max((depth[parent] for parent in parents), default=0))
    return max(depth)


def test_features_are_read_off_the_net_alone() -> None:
    net = drawn(3)
    assert features_of(net.net) == net.features
    assert net.features["operators"] == len(net.net.op)
    assert net.features["failing operators"] == net.failing


def test_an_operator_fails_as_its_switch_says_and_copies_otherwise() -> None:
    net = next(net for net in map(drawn, SEEDS) if net.failing)
    for failure in (Failure.EXCEPTION, Failure.DAGEXEC_ERROR, Failure.UNPRINTABLE):
        with pytest.raises(OperatorError, match=FAILING_OPERATOR):
            run_simple(net, 0, {net.failing - 1: failure})
    with pytest.raises(OperatorError) as caught:
        run_simple(net, 0, {0: Failure.EXCEPTION})
    assert isinstance(caught.value.__cause__, InjectedError)
    run_simple(net, 0)


@pytest.mark.slow
def test_only_stress_knows_the_failing_operator() -> None:
    program = "import dagexec.cli, dagexec.core.registry as r; print(r.registered_operators())"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "Relu" in printed
    assert FAILING_OPERATOR not in printed


@pytest.mark.slow
def test_a_case_follows_from_its_seed_and_what_is_fixed() -> None:
    for seed in SEEDS:
        assert make_case(seed) == make_case(seed)
        free, fixed = make_case(seed), make_case(seed, net_type="async_dag")
        options = dataclasses.replace(free.options, net_type="async_dag")
        assert dataclasses.replace(free, options=options, fixed_net_type="async_dag") == fixed
        assert fixed.replay() == f"dagexec stress --case {seed} --net-type async_dag"
        assert free.replay() == f"dagexec stress --case {seed}"
        assert make_case(seed, "sim:0").replay() == f"dagexec stress --case {seed} --device sim:0"


@pytest.mark.slow
def test_cases_differ_in_all_they_can() -> None:
    cases = [make_case(seed, "sim:0") for seed in SEEDS]
    for name, least in {
        "executors": 2, "repeats": 3, "closing": 5, "devices": 4, "warm": 2, "compiling": 3, "least_bytes_moved": 3,
    }.items():  # fmt: skip
        assert len({getattr(case, name) for case in cases}) == least, name
    for name, least in {
        "net_type": 3, "num_workers": 4, "streams_per_worker": 3, "stream_priority": 2, "replicas": 3, "max_queued": 4,
        "when_full": 2,
    }.items():  # fmt: skip
        assert len({getattr(case.options, name) for case in cases}) == least, name
    requests = [request for case in cases for request in case.requests()]
    assert {request.ending for request in requests} == {"wait", "timeout", "cancel"}
    assert len({request.mistake for request in requests}) == 5
    assert {failure for request in requests for _, failure in request.failures} == set(Failure) - {Failure.NONE}
    assert {caller.backend for case in cases for caller in case.callers} == {"threads", "asyncio", "trio"}
    settings = [case.sim for case in cases if case.sim is not None]
    assert {kind for sim in settings for kind, _ in sim.faults} == {
        "launch", "kernel", "copy", "event", "allocation", "hang",
    }  # fmt: skip
    assert {sim.driver for sim in settings} == {"threads", "seeded"}
    assert all(make_case(seed).sim is None for seed in SEEDS)


def test_unknown_devices_and_net_types_are_refused() -> None:
    with pytest.raises(DeviceError, match="'gpu' is unknown"):
        make_case(0, "gpu")
    with pytest.raises(SchemaError, match="'dog' is unknown"):
        make_case(0, net_type="dog")


@pytest.mark.slow
@pytest.mark.parametrize("net_type", NET_TYPES)
def test_cases_pass_and_count_what_they_tried(net_type: str) -> None:
    found: Counter[str] = Counter()
    before = set(threading.enumerate())
    for seed in range(12):
        found += run_case(make_case(seed, net_type=net_type))
    left = {thread for thread in threading.enumerate() if thread.name != THREAD_NAME} - before
    for thread in left:
        thread.join(30)
    assert not [thread.name for thread in left if thread.is_alive()]
    assert found["cases"] == found[f"net type {net_type}"] == 12
    endings = {name: count for name, count in found.items() if name.startswith("run ended: ")}
    alone = sum(make_case(seed).repeats for seed in range(12))
    assert sum(endings.values()) == found["runs"] - alone
    assert endings["run ended: right"] > 100


def without_dependencies(graph: Graph, seconds: Sequence[float], chains: object = None) -> Plan:
    """A plan whose chains wait for nothing, the last first."""
    plan = build_plan(graph, seconds)
    count = len(plan.chains)
    return dataclasses.replace(
        plan,
        chains=plan.chains[::-1],
        children=((),) * count,
        parent_counts=(0,) * count,
        frontier=tuple(range(count)),
    )


def drop_dependencies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preparation, "build_plan", without_dependencies)


def spoil_results(patch: pytest.MonkeyPatch) -> None:
    """Change the lowest bit of one element that an executor returns."""
    fetch = Replica.fetch

    def spoilt(self: Replica, names: Sequence[str], out: Mapping[str, Array] | None) -> Outputs:
        found = fetch(self, names, out)
        largest = max(found.values(), key=lambda array: array.size)
        if largest.size:
            largest.reshape(-1).view(np.uint8)[0] ^= 1
        return found

    patch.setattr(Replica, "fetch", spoilt)


def leave_a_worker_behind(patch: pytest.MonkeyPatch) -> None:
    """Closing a pool joins no thread but leaves one running."""
    close = WorkerPool.close
    gates: list[threading.Lock] = []

    def forgetful(self: WorkerPool) -> None:
        close(self)
        if not gates:
            gates.append(threading.Lock())
            gates[0].acquire()
            threading.Thread(target=gates[0].acquire, name="dagexec-lost", daemon=True).start()

    patch.setattr(WorkerPool, "close", forgetful)


def share_memory_by_list_order(patch: pytest.MonkeyPatch) -> None:
    """Plan the memory of all nets as if operators followed one another."""
    patch.setattr(preparation, "graph_order", lambda graph: list_order(len(graph)))


@pytest.mark.slow
@pytest.mark.parametrize("plant", [drop_dependencies, spoil_results, leave_a_worker_behind, share_memory_by_list_order])
def test_a_planted_defect_is_found_and_the_printed_command_replays_it(
    plant: Callable[[pytest.MonkeyPatch], None], cli: Cli
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        status, out, err = cli("stress", "--cases", 50, "--seed", 3, "--net-type", "dag", "--json")
        assert status == 1, err
        defect = json.loads(out)["defect"]
        assert defect["problem"] in err
        replay = re.search(r"^replay: dagexec (.*)$", err, re.MULTILINE)
        assert replay is not None
        assert replay[1] == f"stress --case {defect['case']} --net-type dag"
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        status, _, again = cli(*shlex.split(replay[1]))
        assert status == 1, err
        assert f"replay: dagexec {replay[1]}" in again
    status, out, _ = cli(*shlex.split(replay[1]), "--json")
    assert status == 0
    assert json.loads(out)["cases"] == 1


def test_what_was_wrong_is_told_by_blob_and_request() -> None:
    with pytest.MonkeyPatch.context() as patch:
        spoil_results(patch)
        with pytest.raises(CaseFailedError, match=r"wrong result, '\w+' differs in \d+ of \d+ elements: CaseRequest\("):
            run_case(failing_never(make_case(0)))


def failing_never(case: Case) -> Case:
    return dataclasses.replace(case, closing=None, compiling="as given")


@pytest.mark.slow
def test_two_seconds_on_the_command_line(cli: Cli) -> None:
    status, out, err = cli("stress", "--seconds", 2, "--seed", 5, "--json")
    assert status == 0, err
    report = json.loads(out)
    assert (report["device"], report["seed"], report["defect"]) == ("cpu", 5, None)
    assert report["cases"] == report["tried"]["cases"] > 0
    assert report["seconds"] >= 2
    assert report["runs_per_second"] == pytest.approx(report["runs"] / report["seconds"], rel=0.01)


@pytest.mark.slow
def test_the_table_lists_what_was_tried(cli: Cli) -> None:
    status, out, _ = cli("stress", "--cases", 3, "--seed", 5)
    assert status == 0
    assert re.search(r"cpu, seed 5: 3 cases, \d+ runs/s", out)
    assert re.search(r"^ *run ended: right +[\d,]+ *$", out, re.MULTILINE)
    assert re.search(r"^ *in-place writes +[\d,]+ *$", out, re.MULTILINE)


def test_bad_options_are_refused(cli: Cli) -> None:
    assert cli("stress", "--device", "gpu")[0] == 2
    assert cli("stress", "--net-type", "dog")[0] == 2
    for device, said in (("sim:99", "sim:99"), ("cuda:99", "cuda")):  # without CuPy, what installs it
        status, out, err = cli("stress", "--device", device, "--cases", 1)
        assert (status, out) == (2, ""), f"{device} is no defect of a case"
        assert said in err


def test_cases_on_the_last_simulated_device_have_a_second_one_that_exists() -> None:
    devices = {name for seed in range(40) for name in make_case(seed, "sim:63").devices}
    assert devices == {"sim:63", "sim:0", "cpu"}


@pytest.mark.slow
def test_a_case_that_hangs_ends_the_tool_with_all_stacks_and_the_replay_command() -> None:
    program = (
        "import sys; from dagexec.platform.threads import new_gate; from dagexec.stress import runner\n"
        "def wait_for_ever(self): new_gate().acquire()\n"
        "runner._CaseRun.serve = wait_for_ever\n"
        "from dagexec.cli import main\n"
        "sys.argv = ['dagexec', 'stress', '--seed', '1', '--hang-seconds', '0.5']\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "in wait_for_ever" in ended.stderr
    assert "has not ended after 0.5 seconds" in ended.stderr
    assert re.search(r"^replay: dagexec stress --case \d+$", ended.stderr, re.MULTILINE)


def test_a_blob_is_read_in_the_shape_it_has_then_though_it_changes_within_a_run() -> None:
    """An operator whose shapes depend on values used to find the shape that the last writer of its input gives it."""
    net = NetDef(
        name="changing",
        op=[
            operator_def("Relu", ["x"], ["y"]),
            operator_def("Slice", ["y", "zero", "count"], ["part"]),
            operator_def("ReduceFrontSum", ["x"], ["y"], num_reduce_dim=1),
        ],
    )
    workspace = Workspace()
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    for name, array in {"x": x, "zero": np.zeros(1, np.int64), "count": np.array([2])}.items():
        workspace.feed_blob(name, array)
    with SimpleNet(net, workspace) as simple:
        for _ in range(2):
            simple.run()
            np.testing.assert_array_equal(workspace.fetch_blob("part"), x[:2])
            np.testing.assert_array_equal(workspace.fetch_blob("y"), x.sum(0))
