"""Inputs and results without copies, and results into the caller's arrays."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import anyio
import numpy as np
import pytest

import dagexec
from dagexec import NetDef
from dagexec.core import dtypes, registry
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator, Prepared, Step
from dagexec.core.schema import OpSchema, one_to_one
from dagexec.errors import FeedError, OperatorError, RunTimeoutError
from dagexec.scheduler.plan.bindings import MIN_BYTES_BOUND
from tests.held import PATIENCE, doubled_model, held_operators, rows
from tests.interrupts import InterruptedAtPoints
from tests.nets import temporary_operator
from tests.ops.running import operator_def

NET_TYPES = ("simple", "dag", "async_dag")
COUNT = MIN_BYTES_BOUND  # elements, four times as many bytes


class Addresses:
    """Where operators of type Moving, which double, read and wrote, in order. `failing` makes the next one raise."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.written: list[int] = []
        self.failing = False


@pytest.fixture
def addresses() -> Iterator[Addresses]:
    found = Addresses()
    schema = OpSchema(
        "Moving", inputs=(1, 2), outputs=(1, 1), infer=lambda call: [call.inputs[0]], doc="Test.", inplace=one_to_one
    )

    class Moving(Operator):
        def prepare(self) -> Step:
            places = [self.x(0), self.y(0)]

            def rebind(place: int, array: np.ndarray) -> None:
                places[place] = array

            def step() -> None:
                found.read.append(places[0].ctypes.data)
                found.written.append(places[1].ctypes.data)
                np.multiply(places[0], 2, out=places[1])
                if found.failing:
                    raise ValueError("on purpose")

            return Prepared(step, {0: partial(rebind, 0)}, {0: partial(rebind, 1)})

    registry.operator(schema)(Moving)
    try:
        yield found
    finally:
        registry._schemas.pop("Moving")
        registry._operators.pop(("cpu", "Moving", ""))


def model_of(*operators: tuple[str, str, str], outputs: tuple[str, ...] = ("y",)) -> Model:
    net = NetDef(name="io_binding", op=[operator_def(kind, [source], [target]) for kind, source, target in operators])
    return Model("io_binding", net, inputs={"x": InputInfo(dtypes.FLOAT32)}, outputs=outputs)


MOVING = (("Moving", "x", "y"),)


def prepared(model: Model, **options: object) -> dagexec.Executor:
    """An executor that has been fed with as many elements as are moved."""
    options = {"net_type": "simple", "num_workers": 1, **options}
    return dagexec.compile(model, optimize=False, warm_start={"x": (COUNT,)}, **options)  # type: ignore[arg-type]


def numbers(value: float = 1, count: int = COUNT) -> np.ndarray:
    return np.full(count, value, np.float32)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("options", [{}, {"timeout": PATIENCE}])
@pytest.mark.parametrize("net_type", NET_TYPES)
def test_a_large_input_is_read_where_it_is_and_its_result_written_where_it_is_returned(
    addresses: Addresses, net_type: str, options: dict[str, float]
) -> None:
    with prepared(model_of(*MOVING), net_type=net_type) as executor:
        for value in (1, 2):
            feed = numbers(value)
            result = executor.run({"x": feed}, **options)["y"]  # type: ignore[arg-type]
            np.testing.assert_array_equal(result, 2 * feed)
            assert addresses.read[-1] == address(feed)
            assert addresses.written[-1] == address(result)


async def test_tasks_get_their_results_without_copies_too(addresses: Addresses) -> None:
    out = [numbers(0) for _ in range(20)]

    async def one(value: int) -> None:
        results = await executor.run_async({"x": numbers(value)}, out={"y": out[value]})
        assert results["y"] is out[value]

    async with prepared(model_of(*MOVING), replicas=2, num_workers=2) as executor:
        async with anyio.create_task_group() as tasks:
            for value in range(20):
                tasks.start_soon(one, value)
        for value, array in enumerate(out):
            np.testing.assert_array_equal(array, numbers(2 * value))
    assert len(set(addresses.written)) >= 20


@pytest.mark.slow
def test_nothing_holds_on_to_the_callers_arrays(addresses: Addresses) -> None:
    with prepared(model_of(*MOVING)) as executor:
        gc.disable()
        try:
            for failing in (False, True):
                addresses.failing = failing
                feed, out = numbers(), numbers()
                alive = weakref.ref(feed), weakref.ref(out)
                try:
                    executor.run({"x": feed}, out={"y": out})
                except OperatorError:
                    assert failing
                del feed, out
                gc.collect()  # the error's traceback
                assert [reference() for reference in alive] == [None, None]
        finally:
            gc.enable()
        addresses.failing = False
        executor.net().run()  # on its own arrays again
        np.testing.assert_array_equal(executor.run({"x": numbers(4)})["y"], numbers(8))


def test_ctrl_c_at_any_point_leaves_no_operator_at_the_callers_arrays(addresses: Addresses) -> None:
    twice = (("Moving", "x", "y"), ("Moving", "x", "z"), ("Moving", "y", "w"))
    with prepared(model_of(*twice, outputs=("y", "z", "w"))) as executor:

        def run() -> None:
            feed = numbers(3)
            try:
                interrupted.look(lambda: executor.run({"x": feed}))
            finally:
                feed.fill(7)
                addresses.read.clear()
                copied = executor.run({"x": unaligned(5)}, outputs=["z"], out={"z": unaligned(0)})
                np.testing.assert_array_equal(copied["z"], numbers(10), err_msg=f"point {interrupted.point}")
                assert address(feed) not in addresses.read, f"point {interrupted.point}"
                results = executor.run({"x": numbers(2)})
                for name, value in (("y", 4), ("z", 4), ("w", 8)):
                    np.testing.assert_array_equal(results[name], numbers(value), err_msg=f"point {interrupted.point}")

        interrupted = InterruptedAtPoints("dagexec/", "test_transfers")
        interrupted(run)


def unaligned(value: float) -> np.ndarray:
    array = np.frombuffer(bytearray(4 * COUNT + 1), np.uint8)[1:].view(np.float32)
    array.fill(value)
    return array


@pytest.mark.parametrize(
    "feed",
    [
        numbers(count=COUNT * 2)[::2],
        numbers(count=16),
        np.frombuffer(b"\0" + numbers().tobytes(), np.uint8)[1:].view(np.float32),
    ],
    ids=["strided", "small", "unaligned"],
)
def test_other_inputs_are_copied(addresses: Addresses, feed: np.ndarray) -> None:
    with prepared(model_of(*MOVING)) as executor:
        for _ in range(2):
            np.testing.assert_array_equal(executor.run({"x": feed})["y"], 2 * feed)
            assert addresses.read[-1] != address(feed)
        moved = numbers(3)
        np.testing.assert_array_equal(executor.run({"x": moved})["y"], 2 * moved)
        np.testing.assert_array_equal(executor.run({"x": feed})["y"], 2 * feed)


def test_a_read_only_input_is_not_copied(addresses: Addresses) -> None:
    feed = numbers(3)
    feed.flags.writeable = False
    with prepared(model_of(*MOVING)) as executor:
        np.testing.assert_array_equal(executor.run({"x": feed})["y"], numbers(6))
    assert addresses.read[-1] == address(feed)


def test_an_input_is_copied_when_one_of_its_readers_cannot_be_moved(addresses: Addresses) -> None:
    model = model_of(*MOVING, ("Negative", "x", "z"), outputs=("y", "z"))
    with prepared(model) as executor:
        for value in (1, 2):
            feed = numbers(value)
            results = executor.run({"x": feed})
            np.testing.assert_array_equal(results["y"], 2 * feed)
            np.testing.assert_array_equal(results["z"], -feed)
            assert addresses.read[-1] != address(feed)


def test_an_input_that_is_a_result_too_or_asked_for_is_what_was_fed(addresses: Addresses) -> None:
    with prepared(model_of(*MOVING, outputs=("x", "y"))) as executor:
        for value in (1, 2):
            results = executor.run({"x": numbers(value)})
            np.testing.assert_array_equal(results["x"], numbers(value))
    with prepared(model_of(*MOVING)) as executor:
        executor.run({"x": numbers(1)})
        np.testing.assert_array_equal(executor.run({"x": numbers(2)}, outputs=["x"])["x"], numbers(2))


@pytest.mark.parametrize("options", [{}, {"timeout": PATIENCE}])
def test_an_input_that_is_a_result_and_read_by_nobody_is_what_was_fed_in_any_shape(options: dict[str, float]) -> None:
    model = model_of(("Relu", "x", "y"), outputs=("y", "z"))
    model = replace(model, inputs={"x": InputInfo(dtypes.FLOAT32), "z": InputInfo(dtypes.FLOAT32)})
    with dagexec.compile(model, optimize=False, num_workers=1) as executor:
        for value, count in enumerate((3, 3, 5, 5, 3, 3, 5, 5)):
            for other in (count, 2, 4, 4):
                feeds = {"x": numbers(value, count), "z": numbers(value + other, other)}
                results = executor.run(feeds, **options)  # type: ignore[arg-type]
                assert {name: array.tolist() for name, array in results.items()} == {
                    "y": [value] * count,
                    "z": [value + other] * other,
                }


def test_an_input_that_the_net_writes_stays_the_callers(addresses: Addresses) -> None:
    with prepared(model_of(("Moving", "x", "x"), outputs=("x",))) as executor:
        for value in (1, 2):
            feed = numbers(value)
            np.testing.assert_array_equal(executor.run({"x": feed})["x"], 2 * feed)
            np.testing.assert_array_equal(feed, numbers(value))


def test_an_input_that_the_net_writes_later_stays_the_callers(addresses: Addresses) -> None:
    with prepared(model_of(*MOVING, ("Moving", "y", "x"), outputs=("x", "y"))) as executor:
        for outputs in (["y"], ["x", "y"]):
            feed = numbers(3)
            results = executor.run({"x": feed}, outputs=outputs)
            np.testing.assert_array_equal(results["y"], numbers(6))
            np.testing.assert_array_equal(results.get("x", numbers(12)), numbers(12))
            np.testing.assert_array_equal(feed, numbers(3))


def test_a_parameter_that_the_net_updates_is_updated_in_its_own_memory(addresses: Addresses) -> None:
    net = NetDef(name="update", op=[operator_def("Moving", ["w"], ["w"])])
    model = Model("update", net, parameters={"w": numbers(1)}, outputs=("w",))
    with dagexec.compile(model, optimize=False, net_type="simple", num_workers=1) as executor:
        for expected in (2, 4, 8):
            np.testing.assert_array_equal(executor.run({}, out={"w": numbers(0)})["w"], numbers(expected))


def test_an_operator_that_is_prepared_in_the_run_finds_what_was_fed(addresses: Addresses) -> None:
    """It was prepared for other shapes before, and its steps of then could be moved."""
    net = NetDef(name="late", op=[operator_def("Tile", ["z", "n"], ["t"]), operator_def("Moving", ["x", "t"], ["y"])])
    inputs = {name: InputInfo(dtypes.INT32 if name == "n" else dtypes.FLOAT32) for name in ("x", "z", "n")}
    with dagexec.compile(Model("late", net, inputs=inputs, outputs=("y",)), optimize=False, num_workers=1) as executor:
        for count in (COUNT, 2 * COUNT, COUNT):
            for value in (1, 2, 3):
                feeds = {"x": numbers(value, count), "z": numbers(1, 2), "n": np.array([1], np.int32)}
                np.testing.assert_array_equal(executor.run(feeds)["y"], numbers(2 * value, count))
        executor.net().workspace.feed_blob("x", numbers(1, 9))
        np.testing.assert_array_equal(executor.run(feeds)["y"], numbers(6))


def test_a_replica_may_be_fed_again_without_being_unbound(addresses: Addresses) -> None:
    with prepared(model_of(*MOVING)) as executor:
        [replica] = executor._replicas.members
        for feed in (numbers(1), numbers(2, 2 * COUNT)[::2], numbers(3)):
            replica.feed({"x": feed})
            replica.net.run()
            np.testing.assert_array_equal(replica.fetch(("y",), None)["y"], 2 * feed)
        replica.unbind()


def test_a_view_of_an_input_or_a_result_sees_what_was_fed(addresses: Addresses) -> None:
    model = model_of(("Flatten", "x", "flat"), *MOVING, ("Flatten", "y", "z"), outputs=("flat", "y", "z"))
    with prepared(model) as executor:
        for value in (1, 2):
            results = executor.run({"x": numbers(value)})
            np.testing.assert_array_equal(results["flat"].ravel(), numbers(value))
            np.testing.assert_array_equal(results["y"], numbers(2 * value))
            np.testing.assert_array_equal(results["z"].ravel(), numbers(2 * value))


def test_a_result_that_later_operators_read_is_right_for_them_too(addresses: Addresses) -> None:
    chained = (*MOVING, ("Moving", "y", "z"))
    for last in ("Moving", "Negative"):
        with prepared(model_of(*chained, (last, "y", "w"), outputs=("y", "z", "w"))) as executor:
            for value in (1, 2):
                results = executor.run({"x": numbers(value)})
                np.testing.assert_array_equal(results["y"], numbers(2 * value))
                np.testing.assert_array_equal(results["z"], numbers(4 * value))
                np.testing.assert_array_equal(results["w"], numbers(value * (4 if last == "Moving" else -2)))


def test_a_result_written_twice_is_what_was_written_last(addresses: Addresses) -> None:
    with prepared(model_of(*MOVING, ("Moving", "y", "y"), ("Negative", "y", "z"), outputs=("y", "z"))) as executor:
        for value in (1, 2):
            results = executor.run({"x": numbers(value)})
            np.testing.assert_array_equal(results["y"], numbers(4 * value))
            np.testing.assert_array_equal(results["z"], numbers(-4 * value))


@pytest.mark.parametrize("kind", ["Moving", "Negative"])
@pytest.mark.parametrize("net_type", NET_TYPES)
def test_results_are_written_to_the_callers_arrays(addresses: Addresses, net_type: str, kind: str) -> None:
    with prepared(
        model_of((kind, "x", "y"), ("Negative", "x", "z"), outputs=("y", "z")), net_type=net_type
    ) as executor:
        for count in (COUNT, 5, COUNT):
            feed = np.arange(count, dtype=np.float32)
            for options in ({}, {"timeout": PATIENCE}):
                wanted = np.empty(2 * count, np.float32)
                for out in (np.empty(count, np.float32), wanted[::2]):
                    results = executor.run({"x": feed}, out={"y": out}, **options)  # type: ignore[arg-type]
                    assert results["y"] is out
                    np.testing.assert_array_equal(out, feed * (2 if kind == "Moving" else -1))
                    np.testing.assert_array_equal(results["z"], -feed)


@pytest.mark.parametrize(
    "out",
    [numbers(count=2 * COUNT)[::2], numbers()[::-1], np.frombuffer(bytearray(4 * COUNT + 1), np.uint8)[1:].view("f4")],
    ids=["strided", "backwards", "unaligned"],
)
def test_steps_are_given_none_but_packed_and_aligned_arrays_to_write_to(addresses: Addresses, out: np.ndarray) -> None:
    with prepared(model_of(*MOVING)) as executor:
        plain = numbers(0)
        executor.run({"x": numbers(3)}, out={"y": plain})
        assert addresses.written[-1] == address(plain)
        feed = np.arange(COUNT, dtype=np.float32)
        assert executor.run({"x": feed}, out={"y": out})["y"] is out
        assert addresses.written[-1] != address(out)
        np.testing.assert_array_equal(out, 2 * feed)


def test_results_on_devices_are_written_to_the_callers_arrays() -> None:
    out = rows(0)
    with dagexec.compile(doubled_model(), optimize=False, device="sim:0") as executor:
        for value in (1, 2):
            assert executor.run({"x": rows(value)}, out={"y": out})["y"] is out
            np.testing.assert_array_equal(out, rows(2 * value))


def test_many_callers_with_arrays_of_their_own_get_their_own_results(addresses: Addresses) -> None:
    with prepared(model_of(*MOVING), replicas=2, num_workers=2) as executor, ThreadPoolExecutor(6) as threads:

        def call(value: int) -> bool:
            out = numbers(0)
            executor.run({"x": numbers(value)}, out={"y": out})
            return bool((out == 2 * value).all())

        assert all(threads.map(call, range(200)))


def test_a_failed_run_leaves_the_executor_as_it_was(addresses: Addresses) -> None:
    with prepared(model_of(*MOVING)) as executor:
        out = numbers(0)
        for options in ({}, {"timeout": PATIENCE}):
            addresses.failing = True
            with pytest.raises(OperatorError, match="on purpose"):
                executor.run({"x": numbers(3)}, out={"y": out}, **options)  # type: ignore[arg-type]
            addresses.failing = False
            out[...] = 7
            np.testing.assert_array_equal(executor.run({"x": numbers(1)})["y"], numbers(2))
            np.testing.assert_array_equal(out, numbers(7))


def test_a_run_past_its_time_does_not_write_to_the_callers_array_afterwards() -> None:
    with held_operators() as held, temporary_operator("After", lambda operator: operator.y(0).fill(5)):
        model = model_of(("Held", "x", "h"), ("After", "h", "y"))
        with dagexec.compile(model, optimize=False, net_type="simple", num_workers=1) as executor:
            stop = executor._pool.stop

            def stop_and_let_go(run: object, error: BaseException) -> None:
                stop(run, error)  # type: ignore[arg-type]
                held.go_on.release()

            executor._pool.stop = stop_and_let_go  # type: ignore[method-assign, assignment]
            out = np.zeros(1, np.float32)
            with pytest.raises(RunTimeoutError):
                executor.run({"x": np.ones(1, np.float32)}, out={"y": out}, timeout=0.01)
            assert out.tolist() == [0]
            held.go_on.release()
            assert executor.run({"x": np.ones(1, np.float32)}, out={"y": out})["y"].tolist() == [5]


def test_results_of_a_shape_that_the_run_decides_are_checked_at_its_end() -> None:
    net = NetDef(name="tiled", op=[operator_def("Tile", ["x", "times"], ["y"], axis=0)])
    inputs = {"x": InputInfo(dtypes.FLOAT32), "times": InputInfo(dtypes.INT32)}
    with dagexec.compile(Model("tiled", net, inputs=inputs, outputs=("y",)), optimize=False, num_workers=1) as executor:
        for times in (2, 3, 2):
            feeds = {"x": np.array([1, 2], np.float32), "times": np.array([times], np.int32)}
            for _ in range(2):
                out = np.zeros(2 * times, np.float32)
                assert executor.run(feeds, out={"y": out})["y"] is out
                assert out.tolist() == [1, 2] * times
                with pytest.raises(FeedError, match=rf"must be float32 of shape \({2 * times},\), found float32"):
                    executor.run(feeds, out={"y": np.zeros(9, np.float32)})
                assert executor.run(feeds)["y"].tolist() == [1, 2] * times


def test_text_is_written_to_the_callers_array() -> None:
    net = NetDef(name="text", op=[operator_def("Copy", ["x"], ["y"])])
    model = Model(name="text", net=net, inputs={"x": InputInfo()}, outputs=("y",))
    with dagexec.compile(model, optimize=False, num_workers=1) as executor:
        for words in (["a", "b"], ["c", "d"]):
            out = np.empty(2, np.object_)
            executor.run({"x": words}, out={"y": out})
            assert out.tolist() == [word.encode() for word in words]


def read_only() -> np.ndarray:
    array = rows(0)
    array.flags.writeable = False
    return array


FED = rows(1)
SHARED = np.zeros((4, 3), np.float32)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({"y": rows(0).tolist()}, r"out\['y'\] must be a NumPy array, found list"),
        ({"y": read_only()}, r"out\['y'\] is read-only"),
        ({"y": FED}, r"out\['y'\] has memory in common with input 'x'"),
        ({"y": FED[::-1]}, r"out\['y'\] has memory in common with input 'x'"),
        ({"y": SHARED[:2], "h": SHARED[1:3]}, r"out\['h'\] has memory in common with out\['y'\]"),
        (
            {"y": np.lib.stride_tricks.as_strided(rows(0), (2, 3), (0, 4))},
            r"out\['y'\] has several elements in one place",
        ),
        (
            {"y": np.lib.stride_tricks.as_strided(rows(0), (2, 3), (8, 4))},
            r"out\['y'\] has several elements in one place",
        ),
        (
            {"y": np.lib.stride_tricks.as_strided(rows(0), (2, 3), (6, 4))},
            r"out\['y'\] has several elements in one place",
        ),
        ({"z": rows(0)}, r"out: 'z' is not among the results asked for, \['y', 'h'\]"),
        ({"y": rows(0, 3)}, r"out\['y'\] must be float32 of shape \(2, 3\), found float32 of shape \(3, 3\)"),
        ({"y": rows(0).astype(np.float64)}, r"out\['y'\] must be float32 of shape \(2, 3\), found float64 of shape"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
async def test_an_array_that_a_result_cannot_be_written_to_is_refused(
    out: dict[str, np.ndarray], message: str, device: str
) -> None:
    with dagexec.compile(doubled_model(), optimize=False, num_workers=1, device=device) as executor:
        for _ in range(2):
            with pytest.raises(FeedError, match=message):
                executor.run({"x": FED}, outputs=["y", "h"], out=out)
            with pytest.raises(FeedError, match=message):
                await executor.run_async({"x": FED}, outputs=["y", "h"], out=out)
            np.testing.assert_array_equal(executor.run({"x": FED})["y"], rows(2))
    assert FED.tolist() == rows(1).tolist()


def test_interleaved_arrays_have_no_memory_in_common() -> None:
    both = np.ones((2, 6), np.float32)
    with dagexec.compile(doubled_model(), optimize=False, num_workers=1) as executor:
        executor.run({"x": both[:, ::2]}, out={"y": both[:, 1::2]})
    assert both.tolist() == [[1, 2] * 3] * 2


def test_steps_are_moved_that_belong_to_the_shapes_fed(addresses: Addresses) -> None:
    """The net is prepared for a third shape by other hands after it was prepared for the second."""
    with prepared(model_of(*MOVING)) as executor:
        net = executor.net()
        for count in (COUNT, 2 * COUNT, 3 * COUNT):
            net.workspace.feed_blob("x", numbers(1, count))
            net.prepared()
        for count in (2 * COUNT, COUNT, 3 * COUNT, COUNT):
            for _ in range(2):
                feed = numbers(count / COUNT, count)
                result = executor.run({"x": feed})["y"]
                np.testing.assert_array_equal(result, 2 * feed)
            assert addresses.read[-1] == address(feed)
            assert addresses.written[-1] == address(result)


class Shown:
    """An array behind one attribute of the protocols by which libraries show their memory."""

    def __init__(self, array: np.ndarray, protocol: str) -> None:
        shown = getattr(array, protocol)
        setattr(self, protocol, shown)
        if protocol == "__dlpack__":
            self.__dlpack_device__ = array.__dlpack_device__


def shown(array: np.ndarray, protocol: str) -> object:
    kind = type(protocol, (Shown,), {})
    made = kind(array, protocol)
    for name in list(vars(made)):  # Python looks them up in the class
        value = vars(made)[name]
        setattr(kind, name, (lambda self, *a, _f=value, **k: _f(*a, **k)) if callable(value) else value)
        delattr(made, name)
    return made


WAYS_TO_SHOW: dict[str, Callable[[np.ndarray], object]] = {
    "memoryview": memoryview,
    "the buffer protocol": lambda array: memoryview(array).cast("B").cast("f", array.shape),
    "__array__": lambda array: shown(array, "__array__"),
    "__array_interface__": lambda array: shown(array, "__array_interface__"),
    "__array_struct__": lambda array: shown(array, "__array_struct__"),
    "__dlpack__": lambda array: shown(array, "__dlpack__"),
    "a subclass": lambda array: array.view(np.ma.MaskedArray),
    "ctypes": lambda array: (ctypes.c_float * array.shape[1] * array.shape[0]).from_buffer(array),
}


@pytest.mark.parametrize("way", WAYS_TO_SHOW)
async def test_memory_that_an_input_shows_in_any_way_is_not_written_to(way: str) -> None:
    array = rows(1)
    fed = WAYS_TO_SHOW[way](array)
    with dagexec.compile(doubled_model(), num_workers=1) as executor:
        with pytest.raises(FeedError, match=r"out\['y'\] has memory in common with input 'x'"):
            executor.run({"x": fed}, out={"y": array})
        with pytest.raises(FeedError, match=r"out\['y'\] has memory in common with input 'x'"):
            await executor.run_async({"x": fed}, out={"y": array[::-1]})
        assert array.tolist() == rows(1).tolist()
        place = rows(0)
        assert executor.run({"x": fed}, out={"y": place})["y"] is place
        np.testing.assert_array_equal(place, rows(2))


@pytest.mark.parametrize("optimize", [True, False])
def test_a_parameter_is_not_written_to(optimize: bool) -> None:
    weights = np.arange(12, dtype=np.float32).reshape(4, 3)
    model = Model(
        name="linear",
        net=NetDef(name="linear", op=[operator_def("MatMul", ["x", "w"], ["y"])]),
        parameters={"w": weights},
        inputs={"x": InputInfo(dtypes.FLOAT32, (3, 4))},
        outputs=("y",),
    )
    x = np.ones((3, 4), np.float32)
    with dagexec.compile(model, optimize=optimize) as executor:
        expected = executor.run({"x": x})["y"]
        for _ in range(2):
            with pytest.raises(FeedError, match=r"net 'linear': out\['y'\] has memory in common with parameter 'w'"):
                executor.run({"x": x}, out={"y": weights[1:]})
        np.testing.assert_array_equal(executor.run({"x": x})["y"], expected)


def test_results_are_written_backwards_and_with_gaps() -> None:
    with dagexec.compile(doubled_model(), num_workers=1) as executor:
        for place in (rows(0)[::-1, ::-1], np.zeros((4, 6), np.float32)[::2, ::2], np.zeros((3, 2), np.float32).T):
            assert executor.run({"x": rows(1)}, out={"y": place})["y"] is place
            np.testing.assert_array_equal(place, rows(2))


def test_an_input_that_the_net_makes_a_view_of_another_does_not_take_its_place() -> None:
    net = NetDef(name="viewed", external_input=["x", "z"], external_output=["y"])
    net.op.add(type="StopGradient", input=["x"], output=["z"])
    net.op.add(type="Negative", input=["z"], output=["y"])
    info = InputInfo(dtypes.FLOAT32, (None, 8))
    model = Model("viewed", net, inputs={"x": info, "z": info}, outputs=("y",))
    with dagexec.compile(model, optimize=False, net_type="simple") as executor:
        for number in range(4):  # feeds go to where the net reads them from the third run on
            x = np.full((2, 8), number + 1, np.float32)
            np.testing.assert_array_equal(executor.run({"x": x, "z": np.zeros_like(x)})["y"], -x)
