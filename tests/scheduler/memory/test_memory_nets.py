"""Nets with planned memory: the same bytes as without, the proof, and what must keep memory of its own."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, OperatorDef, Workspace, zoo
from dagexec.analysis.comparison import random_feeds
from dagexec.core.operator import Operator, Step, nothing_to_do
from dagexec.core.registry import operator
from dagexec.core.schema import OpSchema, same_as_input
from dagexec.errors import MissingBlobError, OperatorError, ResourceError
from dagexec.platform import host_memory
from dagexec.scheduler.hazards import check_net, detecting
from dagexec.scheduler.memory import MemoryPlan, arena_memory
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.plan.dynamic import CheckedStep
from tests.memory_limits import leave
from tests.ops.running import operator_def

Array = npt.NDArray[Any]
Make = Callable[..., BaseNet]

KINDS: list[Make] = [SimpleNet, DAGNet, AsyncDAGNet]
KINDS_OF_OPERATORS = (
    "Relu", "Sum", "Mul", "Conv", "in place", "view", "Concat", "Split", "again", "Slice", "cut",
)  # fmt: skip


def memory_of(net: BaseNet) -> MemoryPlan:
    """The plan of the net's present preparation."""
    memory = net.prepared().memory
    assert memory is not None
    return memory


def relu(source: str, target: str) -> OperatorDef:
    """A Relu."""
    return operator_def("Relu", [source], [target])


def make(kind: Make, definition: NetDef, workspace: Workspace, workers: int, keep: frozenset[str] | None) -> BaseNet:
    """A net of `kind`; `workers` where it has any."""
    more = {} if kind is SimpleNet else {"num_workers": workers}
    return kind(definition, workspace, keep=keep, **more)


def random_net(rng: random.Random, count: int) -> tuple[NetDef, list[str]]:
    """Operators of many kinds on images of 4 channels, in place and as views too, and blobs to keep."""
    operators: list[OperatorDef] = []
    live = ["x"]
    for index in range(count):
        name = f"b{index}"
        a, b = rng.choice(live), rng.choice(live)
        kind = rng.choice(KINDS_OF_OPERATORS)
        if kind == "in place" and a != "x":
            operators.append(operator_def("Sigmoid", [a], [a]))
            continue
        if kind == "again" and len(live) > 2 and a != "x" and a != b:
            operators.append(operator_def("Tanh", [b], [a]))
            continue
        if kind == "view":
            operators.append(operator_def("Reshape", [a], [f"{name}v", f"{name}s"], shape=[1, 4, 36, 1]))
            operators.append(operator_def("Reshape", [f"{name}v"], [name, f"{name}t"], shape=[1, 4, 6, 6]))
        elif kind == "Concat":
            parts = [a, b, rng.choice(live)]
            operators.append(operator_def("Concat", parts, [f"{name}c", f"{name}s"], axis=1, zero_copy=1))
            operators.append(operator_def("Conv", [f"{name}c", "wide", "bias"], [name], kernel=3, pad=1))
        elif kind == "Split":
            operators.append(operator_def("Split", [a], [f"{name}p", f"{name}q"], axis=1, zero_copy=1))
            operators.append(operator_def("Relu", [f"{name}q"], [f"{name}r"]))
            joined = operator_def("Concat", [f"{name}r", f"{name}p"], [name, f"{name}s"], axis=1, zero_copy=1)
            operators.append(joined)
        elif kind == "Slice":
            cut = {"starts": [0, 1, 0, 0], "ends": [1, 3, 6, 6], "onnx_style": 1, "zero_copy": 1}
            operators.append(operator_def("Slice", [a], [f"{name}p"], **cut))
            joined = operator_def("Concat", [f"{name}p", f"{name}p"], [name, f"{name}s"], axis=1, zero_copy=1)
            operators.append(joined)
        elif kind == "cut":  # of a shape that values decide, through a view
            operators.append(operator_def("Reshape", [a], [f"{name}v", f"{name}s"], shape=[12, 12]))
            operators.append(relu(a, name))
            operators.append(operator_def("Slice", [f"{name}v", "starts", "ends"], [f"{name}p"]))
        elif kind == "Conv":
            operators.append(operator_def("Conv", [a, "narrow", "bias"], [name], kernel=3, pad=1))
        elif kind in ("Sum", "Mul") and a != b:
            operators.append(operator_def(kind, [a, b], [name]))
        else:
            operators.append(relu(a, name))
        live.append(name)
    names = [name for definition in operators for name in definition.output]
    return NetDef(name="random", op=operators), [*rng.sample(names, min(2, len(names))), live[-1]]


def workspace_for(rng: random.Random) -> Workspace:
    """One with the input and the parameters of `random_net`."""
    values = np.random.default_rng(rng.randrange(1 << 30))
    workspace = Workspace()
    shapes = {"x": (1, 4, 6, 6), "narrow": (4, 4, 3, 3), "wide": (4, 12, 3, 3), "bias": (4,)}
    for name, shape in shapes.items():
        workspace.feed_blob(name, values.standard_normal(shape, np.float32))
    workspace.feed_blob("starts", np.zeros(2, np.int64))
    workspace.feed_blob("ends", np.array([7, 5], np.int64))
    return workspace


def results(net: BaseNet, keep: list[str]) -> list[bytes]:
    """What three runs leave in the blobs that are kept, the input fed anew before each."""
    found = []
    for run in range(3):
        net.workspace.feed_blob("x", np.full((1, 4, 6, 6), 0.25 * run, np.float32) + np.eye(6, dtype=np.float32))
        net.run()
        found += [net.workspace.fetch_blob(name).tobytes() for name in keep if name != "x"]
    return found


@pytest.mark.slow
@given(st.integers(0, 1 << 30), st.integers(1, 14))
@settings(max_examples=40, deadline=None)
def test_planned_nets_give_the_bytes_of_unplanned_ones_and_are_proved(seed: int, count: int) -> None:
    definition, keep = random_net(random.Random(seed), count)
    with SimpleNet(definition, workspace_for(random.Random(seed))) as net:
        expected = results(net, keep)
    for kind in KINDS:
        for workers in (1, 4) if kind is not SimpleNet else (1,):
            workspace = workspace_for(random.Random(seed))
            with make(kind, definition, workspace, workers, frozenset(keep)) as net, detecting() as detector:
                proof = check_net(net)
                assert proof.holds, [str(found) for found in (*proof.unordered, *proof.overwritten)]
                assert results(net, keep) == expected
                net.run(trace=detector)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_zoo_models_give_the_same_bytes_with_planned_memory(kind: Make) -> None:
    for name in ("lenet", "squeezenet"):
        model = zoo.build(name)
        found = []
        for keep in (None, frozenset(model.outputs)):
            workspace = Workspace()
            assert model.init_net is not None
            workspace.run_net_once(model.init_net)
            for blob, array in random_feeds(model, {}).items():
                workspace.feed_blob(blob, array)
            with make(kind, model.net, workspace, 2, keep) as net:
                net.run()
                net.run()
                found.append([workspace.fetch_blob(output).tobytes() for output in model.outputs])
                assert check_net(net).holds
        assert found[0] == found[1]


def test_blobs_share_memory_by_list_order_in_a_simple_net_and_by_dependencies_in_the_others() -> None:
    definition = NetDef(name="n", op=[relu("x", "a"), relu("a", "b"), relu("b", "c"), relu("x", "d"), relu("d", "e")])
    peaks = {}
    for kind in KINDS:
        workspace = Workspace()
        workspace.feed_blob("x", np.ones(1000, np.float32))
        with make(kind, definition, workspace, 2, frozenset()) as net:
            net.run()
            peaks[kind] = memory_of(net).peak_bytes
            assert memory_of(net).lower_bound == peaks[kind]
            assert memory_of(net).unshared_bytes == 5 * 4032
    assert peaks == {SimpleNet: 2 * 4032, DAGNet: 4 * 4032, AsyncDAGNet: 4 * 4032}


def test_a_blob_that_is_not_kept_cannot_be_fetched_and_one_that_is_keeps_its_values() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.arange(-3, 4, dtype=np.float32))
    definition = NetDef(name="n", op=[relu("x", "a"), relu("a", "b"), relu("b", "c"), relu("c", "d")])
    with DAGNet(definition, workspace, keep=frozenset({"b", "d"})) as net:
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("b"), [0, 0, 0, 0, 1, 2, 3])
        np.testing.assert_array_equal(workspace.fetch_blob("d"), [0, 0, 0, 0, 1, 2, 3])
        with pytest.raises(MissingBlobError, match=r"'a' is not available after a run.*`keep`"):
            workspace.fetch_blob("a")


def test_feeding_a_planned_blob_does_not_touch_what_is_kept() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.ones(64, np.float32))
    definition = NetDef(name="n", op=[relu("x", "a"), relu("a", "b"), relu("b", "c")])
    with SimpleNet(definition, workspace, keep=frozenset({"c"})) as net:
        net.run()
        for name in "ab":
            workspace.feed_blob(name, np.full(64, 7, np.float32))
        assert workspace.fetch_blob("c").tolist() == [1] * 64
        net.run()
        assert workspace.fetch_blob("c").tolist() == [1] * 64


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_not_laid_into_a_result_that_is_written_over(kind: Make) -> None:
    workspace = Workspace()
    workspace.feed_blob("x", -np.ones((1, 100), np.float32))
    joined = operator_def("Concat", ["a", "b"], ["c", "s"], axis=1, zero_copy=1)
    operators = [operator_def("Copy", ["x"], ["a"]), relu("x", "b"), joined, relu("c", "c")]
    definition = NetDef(name="n", op=operators)
    with make(kind, definition, workspace, 2, frozenset({"a", "c"})) as net:
        assert check_net(net).holds
        net.run()
        assert workspace.fetch_blob("a").tolist() == [[-1] * 100]
        assert workspace.fetch_blob("c").tolist() == [[0] * 200]


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_run_leaves_for_the_next_keeps_memory_of_its_own(kind: Make) -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.ones(100, np.float32))
    workspace.feed_blob("total", np.zeros(100, np.float32))
    definition = NetDef(
        name="n",
        op=[relu("x", "a"), operator_def("Sum", ["total", "a"], ["total"]), relu("total", "b"), relu("b", "y")],
    )
    with make(kind, definition, workspace, 2, frozenset({"y"})) as net:
        for _ in range(3):
            net.run()
        assert workspace.fetch_blob("y").tolist() == [3] * 100
        assert workspace.fetch_blob("total").tolist() == [3] * 100
        assert check_net(net).holds


@pytest.mark.parametrize("kind", KINDS)
def test_preparations_of_other_shapes_come_back_with_their_own_plan(kind: Make) -> None:
    workspace = Workspace()
    definition = NetDef(name="n", op=[relu("x", "a"), relu("a", "b"), relu("b", "y")])
    workspace.feed_blob("x", np.ones(1, np.float32))
    with make(kind, definition, workspace, 2, frozenset({"x", "y"})) as net:
        for size in (1, 500, 3, 500, 1, 7, 9, 11, 500):
            workspace.feed_blob("x", np.arange(size, dtype=np.float32))
            net.run()
            np.testing.assert_array_equal(workspace.fetch_blob("y"), np.arange(size))
            assert check_net(net).holds


@pytest.mark.parametrize("kind", KINDS)
def test_a_preparation_that_comes_back_is_proved_with_its_own_pieces_and_working_memory(kind: Make) -> None:
    workspace = Workspace()
    definition = NetDef(
        name="n",
        op=[
            operator_def("TestWorkingMemory", ["x"], ["a"]),
            operator_def("Split", ["a"], ["p", "q"], axis=1, zero_copy=1),
            relu("q", "r"),
            operator_def("Concat", ["r", "p"], ["y"], axis=1, zero_copy=1),
        ],
    )
    workspace.feed_blob("x", np.ones((1, 4), np.float32))
    with make(kind, definition, workspace, 2, frozenset({"y"})) as net:
        seen: dict[int, list[object]] = {}
        for rows in (1, 3, 1, 3):  # the parts of several rows are no pieces
            workspace.feed_blob("x", np.ones((rows, 4), np.float32))
            net.run()
            assert check_net(net).holds
            prepared = net.prepared().prepared
            working = prepared[0].working_memory
            assert [array.size for array in working] == [16 * rows]
            pieces = [(one.inputs_in_place, one.outputs_in_place) for one in prepared]
            said = [list(map(id, working)), *pieces]
            assert seen.setdefault(rows, said) == said
        assert seen[1][2] == ((), (0, 1))
        assert seen[3][2] == ((), ())


@pytest.mark.parametrize("kind", KINDS)
def test_operators_of_unknown_shape_and_what_they_touch_keep_memory_of_their_own(kind: Make) -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.arange(12, dtype=np.float32))
    workspace.feed_blob("shape", np.array([3, 4], np.int64))
    definition = NetDef(
        name="n",
        op=[
            operator_def("Copy", ["shape"], ["computed"]),
            relu("x", "a"),
            relu("a", "b"),
            operator_def("Reshape", ["b", "computed"], ["r", "old"]),
            relu("r", "y"),
            relu("a", "c"),
            relu("c", "z"),
        ],
    )
    with make(kind, definition, workspace, 2, frozenset({"y", "z"})) as net:
        for shape in [(3, 4), (2, 6), (12, 1)]:
            workspace.feed_blob("shape", np.array(shape, np.int64))
            net.run()
            np.testing.assert_array_equal(workspace.fetch_blob("y"), np.arange(12).reshape(shape))
            np.testing.assert_array_equal(workspace.fetch_blob("z"), np.arange(12))
        assert {buffer.name for buffer in memory_of(net).buffers} == {"a", "c", "z"}
        assert sum(isinstance(step, CheckedStep) for step in net.prepared().steps) == 2
        assert memory_of(net).own_bytes > 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_operator_of_unknown_shape_reads_through_views_keeps_memory_of_its_own(kind: Make) -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.arange(16, dtype=np.float32))
    workspace.feed_blob("starts", np.zeros(2, np.int64))
    workspace.feed_blob("ends", np.array([2, 3], np.int64))
    cut = operator_def("Slice", ["w", "starts", "ends"], ["y"])
    cut.control_input.append("e")
    definition = NetDef(
        name="n",
        op=[
            relu("x", "a"),
            operator_def("Reshape", ["a"], ["v", "s"], shape=[2, 8]),
            operator_def("Reshape", ["v"], ["w", "t"], shape=[4, 4]),
            operator_def("Tanh", ["a"], ["b"]),
            operator_def("Tanh", ["b"], ["c"]),
            operator_def("Tanh", ["c"], ["d"]),
            operator_def("Tanh", ["d"], ["e"]),
            cut,
        ],
    )
    with make(kind, definition, workspace, 2, frozenset({"y"})) as net:
        for _ in range(2):
            net.run()
            assert workspace.fetch_blob("y").tolist() == [[0, 1, 2], [4, 5, 6]]
        assert not {"a", "v", "w"} & {buffer.name for buffer in memory_of(net).buffers}
        assert check_net(net).holds


def test_strings_and_strided_tensors_keep_memory_of_their_own() -> None:
    workspace = Workspace()
    workspace.feed_blob("s", np.array(["a", "bb"]))
    workspace.feed_blob("x", np.ones((4, 4), np.float32))
    rows = np.zeros((4, 8), np.float32)[:, ::2]
    workspace.adopt_strided_blob("a", rows, writable=True)
    definition = NetDef(name="n", op=[operator_def("Copy", ["s"], ["t"]), relu("x", "a"), relu("a", "y")])
    with SimpleNet(definition, workspace, keep=frozenset({"y"})) as net:
        net.run()
        assert {buffer.name for buffer in memory_of(net).buffers} == {"y"}
        assert rows.tolist() == [[1] * 4] * 4
        assert workspace.fetch_blob("t").tolist() == [b"a", b"bb"]


def test_memory_that_does_not_suffice_is_refused_with_the_numbers_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.ones(1000, np.float32))
    definition = NetDef(name="n", op=[relu("x", "a"), relu("a", "b"), relu("b", "c"), relu("c", "d")])
    with SimpleNet(definition, workspace, keep=frozenset()) as net:
        leave(monkeypatch, 8000)
        with pytest.raises(ResourceError, match=r"net 'n': its memory plan takes 8,064 bytes for 4 buffers \(16,128 "):
            net.run()
        monkeypatch.undo()
        net.run()


WORKING = OpSchema("TestWorkingMemory", inputs=(1, 1), outputs=(1, 1), infer=same_as_input, doc="Copies by way of it.")


@operator(WORKING)
class WorkingMemoryUser(Operator):
    """Copies its input into working memory, waits for the other user where one is told of, and copies it on."""

    meeting: threading.Barrier | None = None

    def prepare(self) -> Step:
        """Of the input's size."""
        x, y = self.x(0), self.y(0)
        memory = self.working_memory(x.nbytes)[: x.nbytes].view(x.dtype).reshape(x.shape)

        def step() -> None:
            np.copyto(memory, x)
            if WorkingMemoryUser.meeting is not None:
                WorkingMemoryUser.meeting.wait(5)
            np.copyto(y, memory)

        return step


def two_users() -> tuple[NetDef, Workspace]:
    """Two operators with working memory that do not depend on each other."""
    workspace = Workspace()
    workspace.feed_blob("x", np.arange(1000, dtype=np.float32))
    workspace.feed_blob("z", np.arange(1000, dtype=np.float32) + 5)
    users = [operator_def("TestWorkingMemory", [name], [f"{name}y"]) for name in "xz"]
    return NetDef(name="n", op=users), workspace


def test_operators_that_follow_one_another_share_working_memory_and_those_side_by_side_do_not() -> None:
    extents = {}
    for kind in KINDS:
        definition, workspace = two_users()
        with make(kind, definition, workspace, 2, frozenset({"xy", "zy"})) as net:
            assert check_net(net).holds
            memory = memory_of(net)
            extents[kind] = memory.working_bytes
            assert memory.unshared_working_bytes == 2 * 4032
            assert memory.lower_bound <= memory.peak_bytes
    in_the_place_of_zy = 4032
    assert extents == {SimpleNet: 2 * 4032 - in_the_place_of_zy, DAGNet: 2 * 4032, AsyncDAGNet: 2 * 4032}


def test_two_operators_with_working_memory_at_work_at_one_time_do_not_disturb_each_other() -> None:
    definition, workspace = two_users()
    WorkingMemoryUser.meeting = threading.Barrier(2)
    try:
        with DAGNet(definition, workspace, num_workers=2, keep=frozenset({"xy", "zy"})) as net:
            net.run()
    finally:
        WorkingMemoryUser.meeting = None
    np.testing.assert_array_equal(workspace.fetch_blob("xy"), np.arange(1000))
    np.testing.assert_array_equal(workspace.fetch_blob("zy"), np.arange(1000) + 5)


def test_working_memory_larger_than_the_room_behind_the_buffers_gets_a_block_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena_memory, "reserve", lambda _nbytes: None)
    workspace = Workspace()
    workspace.feed_blob("x", np.arange(1 << 19, dtype=np.float32))
    definition = NetDef(
        name="n", op=[operator_def("TestWorkingMemory", [s], [t]) for s, t in (("x", "a"), ("x", "b"), ("x", "c"))]
    )
    with DAGNet(definition, workspace, num_workers=3, keep=frozenset("abc")) as net:
        net.run()
        assert check_net(net).holds
        assert memory_of(net).working_bytes == 3 << 21
        for name in "abc":
            np.testing.assert_array_equal(workspace.fetch_blob(name), np.arange(1 << 19))


def test_working_memory_that_the_machine_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    definition, workspace = two_users()
    with SimpleNet(definition, workspace, keep=frozenset({"xy", "zy"})) as net:
        monkeypatch.setattr(host_memory, "_MIN_LISTED", 0)
        leave(monkeypatch, 8100)
        with pytest.raises(
            ResourceError,
            match=r"working memory of 4,000 bytes in the arena .* needs 4,032 bytes; this machine has 4,004",
        ):
            net.run()
        monkeypatch.undo()
        net.run()


def test_a_run_of_a_planned_net_allocates_nothing_of_the_size_of_a_tensor() -> None:
    model = zoo.build("squeezenet")
    workspace = Workspace()
    assert model.init_net is not None
    workspace.run_net_once(model.init_net)
    for blob, array in random_feeds(model, {}).items():
        workspace.feed_blob(blob, array)
    with DAGNet(model.net, workspace, num_workers=2, keep=frozenset(model.outputs)) as net:
        net.run()
        smallest = 64 << 10  # bytes; NumPy's own iterator takes up to 32 KiB for a moment in each thread
        tracemalloc.start()
        try:
            for _ in range(2):
                net.run()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < smallest + (32 << 10)


def test_a_failed_run_leaves_a_planned_net_usable() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.ones(10, np.float32))
    workspace.feed_blob("i", np.array([3], np.int64))
    definition = NetDef(
        name="n", op=[relu("x", "a"), operator_def("Gather", ["a", "i"], ["g"]), relu("g", "h"), relu("h", "y")]
    )
    with DAGNet(definition, workspace, num_workers=2, keep=frozenset({"y"})) as net:
        net.run()
        workspace.feed_blob("i", np.array([30], np.int64))
        with pytest.raises(OperatorError):
            net.run()
        workspace.feed_blob("i", np.array([4], np.int64))
        net.run()
        assert workspace.fetch_blob("y").tolist() == [1]


def test_every_operator_whose_output_may_be_a_view_has_nothing_to_do_then() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.ones((2, 3), np.float32))
    definition = NetDef(name="n", op=[relu("x", "a"), operator_def("Flatten", ["a"], ["f"]), relu("f", "y")])
    with SimpleNet(definition, workspace, keep=frozenset({"y"})) as net:
        net.run()
        assert net.prepared().steps[1] is nothing_to_do
        assert [buffer.name for buffer in memory_of(net).buffers] == ["a", "y"]
