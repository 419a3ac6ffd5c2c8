"""The embedding facade: checked feeds, concurrent callers, asyncio and trio, timeouts, cancellation, closing."""

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

import dagexec
from dagexec import NetDef
from dagexec.core import dtypes
from dagexec.core.feeds import check_feeds
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator
from dagexec.errors import ClosedError, FeedError, OperatorError, RunCancelledError, RunTimeoutError, SchemaError
from dagexec.executor.executor import Executor
from dagexec.options import CompileOptions
from dagexec.platform.threads import new_gate
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.workers.place import Place
from tests.held import PATIENCE, Held, doubled_model, rows
from tests.nets import temporary_operator
from tests.new_threads import new_threads
from tests.ops.running import operator_def

NET_TYPES = ["simple", "dag", "async_dag"]


@pytest.fixture(params=NET_TYPES)
def net_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def release_after_cancelling(executor: dagexec.Executor, held: Held) -> None:
    """Let one held operator go on whenever a request has been told to stop, not before."""
    cancel = executor._dispatcher.cancel

    def cancel_and_release(*arguments: object) -> bool:
        found = cancel(*arguments)  # type: ignore[arg-type]
        held.go_on.release()
        return found

    executor._dispatcher.cancel = cancel_and_release  # type: ignore[method-assign]


def test_run_returns_the_outputs_by_name(net_type: str) -> None:
    with dagexec.compile(doubled_model(), optimize=False, net_type=net_type, num_workers=2) as executor:
        result = executor.run({"x": rows(3)})
        assert list(result) == ["y"]
        np.testing.assert_array_equal(result["y"], rows(6))
        np.testing.assert_array_equal(executor.run({"x": rows(-1)}, outputs=["h", "y"])["h"], rows(0))
        np.testing.assert_array_equal(result["y"], rows(6))  # results are the caller's own


def test_inputs_may_change_their_free_axes_between_runs(net_type: str) -> None:
    with dagexec.compile(doubled_model(), optimize=False, net_type=net_type) as executor:
        for count in (1, 5, 1, 2):
            assert executor.run({"x": rows(1, count)})["y"].shape == (count, 3)


def test_shapes_to_optimize_for_are_those_of_inputs() -> None:
    with pytest.raises(FeedError, match=r"shapes: 'xs' is not an input; it has \['x'\]; did you mean 'x'\?"):
        dagexec.compile(doubled_model(), shapes={"xs": (2, 3)})


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, r"missing input\(s\) \['x'\]"),
        ({"x": rows(1), "z": rows(1)}, r"unknown input\(s\) \['z'\]; expected \['x'\]"),
        ({"xs": np.ones((7, 7))}, r"unknown input\(s\) \['xs'\]; expected \['x'\], found \['xs'\]; did you mean 'x'\?"),
        ({"x": np.ones((2, 3))}, r"'x' must be float32, found float64; convert it with array.astype\(float32\)"),
        ({"x": np.ones((2, 4), np.float32)}, r"'x' must have shape \('any', 3\), found \(2, 4\)"),
        ({"x": np.ones((3,), np.float32)}, r"'x' must have shape \('any', 3\), found \(3,\)"),
        ({"x": np.ones((2, 3), "timedelta64[s]")}, r"timedelta64\[s\] is not one a tensor can hold"),
    ],
)
def test_feeds_that_do_not_match_are_refused_with_what_was_expected(feeds: dict[str, object], message: str) -> None:
    with dagexec.compile(doubled_model(), optimize=False) as executor:
        with pytest.raises(FeedError, match=message):
            executor.run(feeds)  # type: ignore[arg-type]
        np.testing.assert_array_equal(executor.run({"x": rows(1)})["y"], rows(2))


def test_an_input_that_no_operator_reads_may_be_left_out_but_is_checked_when_fed() -> None:
    model = dataclasses.replace(
        doubled_model(), inputs={**doubled_model().inputs, "label": InputInfo(dtypes.INT32, (None,))}
    )
    with dagexec.compile(model, optimize=False) as executor:
        for feeds in ({"x": rows(1)}, {"x": rows(1), "label": np.zeros(2, np.int32)}):
            np.testing.assert_array_equal(executor.run(feeds)["y"], rows(2))
        with pytest.raises(FeedError, match="'label' must be int32, found float32"):
            executor.run({"x": rows(1), "label": np.zeros(2, np.float32)})
        with pytest.raises(FeedError, match=r"missing input\(s\) \['x'\]"):
            executor.run({"label": np.zeros(2, np.int32)})


def test_an_output_that_is_no_blob_is_refused() -> None:
    with (
        dagexec.compile(doubled_model(), optimize=False) as executor,
        pytest.raises(FeedError, match="'nothing' is not a blob"),
    ):
        executor.run({"x": rows(1)}, outputs=["nothing"])


def test_a_blob_that_the_rewritten_net_alone_has_is_refused() -> None:
    given = doubled_model()
    net = NetDef(name="rewritten", op=[operator_def("Copy", ["x"], ["x/NHWC"]), *given.net.op])
    rewritten = dataclasses.replace(given, net=net)
    with Executor(rewritten, CompileOptions(net_type="simple", num_workers=1), given) as executor:
        for feeds in ({"x": rows(1)}, {"x": rows(1, 2)}):
            executor.run(feeds)
            with pytest.raises(FeedError, match="'x/NHWC' is not a blob"):
                executor.run(feeds, outputs=["x/NHWC"])
            for name in given.parameters:
                np.testing.assert_array_equal(executor.run(feeds, outputs=[name])[name], given.parameters[name])


def test_an_unknown_net_type_is_refused() -> None:
    with pytest.raises(SchemaError, match="'dog' is unknown; expected one of simple, dag, async_dag"):
        dagexec.compile(doubled_model(), optimize=False, net_type="dog")


def test_replicas_share_parameters_and_nothing_else(net_type: str) -> None:
    with dagexec.compile(doubled_model(), optimize=False, net_type=net_type, replicas=3) as executor:
        workspaces = [replica.workspace for replica in executor._replicas.members]
        scales = {id(workspace.get_blob("scale")) for workspace in workspaces}
        outputs = {id(workspace.get_blob("y")) for workspace in workspaces}
    assert (len(scales), len(outputs)) == (1, 3)


def test_parameters_are_used_without_a_copy() -> None:
    model = doubled_model()
    with dagexec.compile(model, optimize=False, replicas=2) as executor:
        used = executor._replicas.members[1].workspace.get_blob("scale").tensor().array
        assert np.shares_memory(used, model.parameters["scale"])


def test_many_threads_may_run_at_once(net_type: str) -> None:
    with (
        dagexec.compile(doubled_model(), optimize=False, net_type=net_type, replicas=3, num_workers=2) as executor,
        ThreadPoolExecutor(8) as threads,
    ):
        results = list(threads.map(lambda value: executor.run({"x": rows(value)})["y"], range(100)))
    for value, result in enumerate(results):
        np.testing.assert_array_equal(result, rows(2 * value))
    statistics = executor.statistics()
    assert (statistics.completed, statistics.failed, statistics.running, statistics.queued) == (100, 0, 0, 0)
    assert statistics.median_latency is not None


async def test_many_tasks_may_run_at_once(net_type: str) -> None:
    results: dict[int, np.ndarray] = {}

    async with dagexec.compile(doubled_model(), optimize=False, net_type=net_type, replicas=2) as executor:

        async def one(value: int) -> None:
            results[value] = (await executor.run_async({"x": rows(value)}, timeout=PATIENCE))["y"]

        async with anyio.create_task_group() as tasks:
            for value in range(50):
                tasks.start_soon(one, value)
    assert sorted(results) == list(range(50))
    for value, result in results.items():
        np.testing.assert_array_equal(result, rows(2 * value))


async def test_the_event_loop_goes_on_while_a_run_waits(held: Held) -> None:
    with dagexec.compile(doubled_model("Held"), optimize=False) as executor:

        async def let_go() -> None:  # can only run while the other task awaits
            held.go_on.release()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(let_go)
            np.testing.assert_array_equal((await executor.run_async({"x": rows(0)}))["y"], [2, 2, 2])


async def test_a_cancelled_await_ends_when_the_worker_has_left(held: Held, net_type: str) -> None:
    with dagexec.compile(doubled_model("Held"), optimize=False, net_type=net_type, num_workers=1) as executor:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(executor.run_async, {"x": rows(0)})
            await anyio.to_thread.run_sync(held.wait_inside)
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
                assert executor.statistics().running == 1
            held.go_on.release()
        assert executor.statistics().running == 0
        assert executor.statistics().cancelled == 1
        held.go_on.release()
        np.testing.assert_array_equal((await executor.run_async({"x": rows(0)}))["y"], [2, 2, 2])


async def test_an_await_past_its_timeout_raises_and_the_executor_serves_the_next(held: Held) -> None:
    with dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1) as executor:
        release_after_cancelling(executor, held)
        with pytest.raises(RunTimeoutError, match=r"not done within 0\.02 seconds"):
            await executor.run_async({"x": rows(0)}, timeout=0.02)
        held.go_on.release()
        await executor.run_async({"x": rows(0)}, timeout=PATIENCE)


async def test_a_request_cancelled_before_it_was_fed_never_runs(held: Held) -> None:
    with dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1, replicas=2) as executor:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(executor.run_async, {"x": rows(0)})
            await anyio.to_thread.run_sync(held.wait_inside)  # the only worker is busy from here on
            release_after_cancelling(executor, held)
            with anyio.CancelScope() as second:

                async def cancel_second() -> None:
                    second.cancel()

                tasks.start_soon(cancel_second)
                await executor.run_async({"x": rows(0)})
            assert second.cancelled_caught
        assert (executor.statistics().completed, executor.statistics().cancelled) == (1, 1)
        assert not held.inside.acquire(blocking=False)


def test_a_blocking_run_past_its_timeout_raises_and_the_executor_serves_the_next(held: Held) -> None:
    with dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1) as executor:
        release_after_cancelling(executor, held)
        with pytest.raises(RunTimeoutError, match=r"not done within 0\.02 seconds"):
            executor.run({"x": rows(0)}, timeout=0.02)
        held.go_on.release()
        executor.run({"x": rows(0)}, timeout=PATIENCE)


@pytest.mark.parametrize(
    "options",
    [{}, {"pool": "own"}, {"num_workers": 2, "net_type": "dag"}, {"max_batch": 4, "max_wait": 0.0}, {"replicas": 2}],
)
async def test_a_call_without_any_time_never_completes(options: dict[str, Any]) -> None:
    calls = 100
    with dagexec.compile(doubled_model(), **options) as executor:
        executor.run({"x": rows(1)})
        for timeout in (0, 0.0, 1e-9):
            for _ in range(calls):
                with pytest.raises(RunTimeoutError):
                    executor.run({"x": rows(1)}, timeout=timeout)
                with pytest.raises(RunTimeoutError):
                    await executor.run_async({"x": rows(1)}, timeout=timeout)
        counts = executor.statistics()
        assert (counts.completed, counts.timed_out) == (1, 6 * calls)


def test_a_request_that_times_out_in_the_queue_never_runs(held: Held) -> None:
    with (
        dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1) as executor,
        ThreadPoolExecutor(1) as threads,
    ):
        first = threads.submit(executor.run, {"x": rows(0)})
        held.wait_inside()
        with pytest.raises(RunTimeoutError):
            executor.run({"x": rows(0)}, timeout=0.01)
        assert executor.statistics().queued == 0
        held.go_on.release()
        first.result(PATIENCE)
        assert executor.statistics().completed == 1


def test_a_failing_operator_fails_its_own_run_only() -> None:
    def body(operator: Operator) -> None:
        if operator.x(0)[0, 0] < 0:
            raise ValueError("negative")

    with (
        temporary_operator("Picky", body),
        dagexec.compile(picky_model(), optimize=False, replicas=2) as executor,
        ThreadPoolExecutor(4) as threads,
    ):
        futures = [threads.submit(executor.run, {"x": rows(-1 if value % 3 == 0 else value)}) for value in range(30)]
        for value, future in enumerate(futures):
            if value % 3 == 0:
                with pytest.raises(OperatorError, match=r"Picky 'h'.*negative"):
                    future.result(PATIENCE)
            else:
                future.result(PATIENCE)
    assert (executor.statistics().failed, executor.statistics().completed) == (10, 20)


def picky_model() -> Model:
    net = NetDef(name="picky", op=[operator_def("Picky", ["x"], ["h"])])
    return Model("picky", net, inputs={"x": InputInfo()}, outputs=("h",))


def test_a_closed_executor_refuses_runs_and_ends_queued_ones(held: Held) -> None:
    executor = dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1)
    with ThreadPoolExecutor(3) as threads:
        running = threads.submit(executor.run, {"x": rows(0)})
        held.wait_inside()
        queued = threads.submit(executor.run, {"x": rows(0)})
        while executor.statistics().queued == 0:
            pass
        closing = threads.submit(executor.close)
        with pytest.raises(ClosedError):
            queued.result(PATIENCE)
        held.go_on.release()
        running.result(PATIENCE)
        closing.result(PATIENCE)
    with pytest.raises(ClosedError, match="the executor is closed"):
        executor.run({"x": rows(0)})


def test_executors_on_one_pool_leave_it_open_and_each_other_alone(net_type: str) -> None:
    def executor() -> Executor:
        return Executor(doubled_model(), CompileOptions(net_type=net_type, num_workers=9), place=Place("doubled", pool))

    with WorkerPool(2, name="shared") as pool:
        started = new_threads()
        with executor() as first:
            with executor() as second:
                assert (first.num_workers, started()) == (2, 0)
                for one in (first, second):
                    np.testing.assert_array_equal(one.run({"x": rows(3)}, timeout=PATIENCE)["y"], rows(6))
            np.testing.assert_array_equal(first.run({"x": rows(4)}, timeout=PATIENCE)["y"], rows(8))
        assert pool.statistics().workers == 2
        dropped = weakref.ref(executor())
        gc.collect()
        assert dropped() is None
        with executor() as third:
            np.testing.assert_array_equal(third.run({"x": rows(5)}, timeout=PATIENCE)["y"], rows(10))


def test_closing_leaves_no_thread_and_gives_blas_its_threads_back() -> None:
    started = new_threads()
    limits = _blas_threads()
    executor = dagexec.compile(doubled_model(), optimize=False, num_workers=2, replicas=2)
    assert set(_blas_threads()) == {1}
    executor.run({"x": rows(1)})
    executor.close()
    assert started() == 0
    assert _blas_threads() == limits


def _blas_threads() -> list[int]:
    controllers = ThreadpoolController().select(user_api="blas").lib_controllers
    return [controller.num_threads for controller in controllers]


def test_there_is_a_worker_a_core_and_one_blas_thread_however_many_pieces_are_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dagexec.platform.processor.available_cores", lambda: 8)
    for pieces in (1, 2, 4):
        with dagexec.compile(doubled_model(), optimize=False, intra_op_threads=pieces) as executor:
            assert executor.num_workers == 8
            assert set(_blas_threads()) == {1}


def test_results_are_freed_without_waiting_for_the_garbage_collector() -> None:
    with dagexec.compile(doubled_model(), optimize=False) as executor:
        gc.disable()
        try:
            result = executor.run({"x": rows(1)})["y"]
            alive = weakref.ref(result)
            del result
            assert _becomes(lambda: alive() is None)
        finally:
            gc.enable()


def _becomes(condition: Callable[[], bool]) -> bool:
    """True once `condition` holds; a worker may still be leaving the function that held the last reference."""
    return any(condition() for _ in range(100_000))


def test_a_trace_of_a_run_names_the_worker_threads() -> None:
    trace = Trace()
    with dagexec.compile(doubled_model(), optimize=False, num_workers=1) as executor:
        executor.run({"x": rows(1)}, trace=trace)
    assert [span.operator for span in trace.spans] == [0, 1]
    assert {span.thread for span in trace.spans} == {"dagexec-doubled-0"}


def test_a_net_that_updates_a_parameter_does_so_in_each_replica_on_its_own() -> None:
    net = NetDef(name="counter", op=[operator_def("Add", ["count", "x"], ["count"])])
    start = np.zeros(1, np.float32)
    model = Model("counter", net, parameters={"count": start}, inputs={"x": InputInfo()}, outputs=("count",))
    with dagexec.compile(model, optimize=False, replicas=1) as executor:
        values = [executor.run({"x": np.ones(1, np.float32)})["count"][0] for _ in range(3)]
    assert values == [1, 2, 3]
    assert start[0] == 0


def test_an_interrupted_caller_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch, held: Held) -> None:
    with dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1) as executor:
        stop = executor._pool.stop
        reasons: list[BaseException] = []

        def stop_and_let_go(run: object, error: BaseException) -> None:
            stop(run, error)  # type: ignore[arg-type]
            reasons.append(error)
            held.go_on.release()

        monkeypatch.setattr(executor._pool, "stop", stop_and_let_go)

        class InterruptedGate:
            """A gate whose first wait ends as Ctrl-C would end it."""

            def __init__(self) -> None:
                self._gate = new_gate()
                self._waits = 0

            def acquire(self, timeout: float = -1) -> bool:
                self._waits += 1
                if self._waits == 1:
                    held.wait_inside()
                    raise KeyboardInterrupt
                return self._gate.acquire(timeout=timeout)

            def release(self) -> None:
                self._gate.release()

        monkeypatch.setattr("dagexec.platform.threads.new_gate", InterruptedGate)
        with pytest.raises(KeyboardInterrupt):
            executor.run({"x": rows(0)}, timeout=PATIENCE)
        monkeypatch.undo()
        assert isinstance(reasons[0], RunCancelledError)
        assert executor.statistics().running == 0


def test_a_net_without_operators_runs(net_type: str) -> None:
    model = Model(name="empty", net=NetDef(name="empty"))
    with dagexec.compile(model, optimize=False, net_type=net_type) as executor:
        assert executor.run({}) == {}
        assert executor.run({}, trace=Trace()) == {}


@pytest.mark.parametrize("option", ["num_workers", "replicas", "intra_op_threads"])
@pytest.mark.parametrize("count", [0, -1])
def test_a_count_below_one_is_refused(option: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 .* is needed, found {count}"):
        dagexec.compile(doubled_model(), optimize=False, **{option: count})


def test_lists_of_unequal_lengths_are_a_feed_error_that_names_the_input() -> None:
    with (
        dagexec.compile(doubled_model(), optimize=False) as executor,
        pytest.raises(FeedError, match=r"input 'x': .*inhomogeneous"),
    ):
        executor.run({"x": [[1.0], [1.0, 2.0]]})


def test_objects_that_are_not_text_are_a_feed_error_that_names_the_input() -> None:
    net = NetDef(name="text", op=[operator_def("Copy", ["x"], ["y"])])
    model = Model(name="text", net=net, inputs={"x": InputInfo()}, outputs=("y",))
    with dagexec.compile(model, optimize=False) as executor:
        with pytest.raises(FeedError, match=r"input 'x': .*found int at element 1"):
            executor.run({"x": np.array(["a", 3], np.object_)})
        assert executor.run({"x": ["a", "b"]})["y"].tolist() == [b"a", b"b"]


@pytest.mark.slow
def test_an_executor_dropped_without_close_leaves_no_thread_behind(net_type: str) -> None:
    before = set(threading.enumerate())
    executor = dagexec.compile(doubled_model(), optimize=False, net_type=net_type, num_workers=2)
    executor.run({"x": rows(1)})
    threads = set(threading.enumerate()) - before
    assert threads
    del executor
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("timeout", [-1, -0.5, float("nan")])
async def test_a_timeout_that_is_no_time_is_refused(timeout: float) -> None:
    with dagexec.compile(doubled_model(), optimize=False) as executor:
        with pytest.raises(ValueError, match="at least 0 seconds"):
            executor.run({"x": rows(1)}, timeout=timeout)
        with pytest.raises(ValueError, match="at least 0 seconds"):
            await executor.run_async({"x": rows(1)}, timeout=timeout)
        assert executor.statistics().completed == 0


def test_a_timeout_may_be_infinite(net_type: str) -> None:
    with dagexec.compile(doubled_model(), optimize=False, net_type=net_type) as executor:
        assert executor.run({"x": rows(1)}, timeout=float("inf"))["y"].tolist() == rows(2).tolist()


def test_an_operator_cannot_close_the_executor_that_runs_it(net_type: str) -> None:
    found: list[dagexec.Executor] = []
    results: list[BaseException] = []

    def run() -> None:
        try:
            found[0].run({})
        except OperatorError as error:
            results.append(error)

    with temporary_operator("CloseExecutor", lambda operator: found[0].close()):
        net = NetDef(name="closing", op=[operator_def("CloseExecutor", [], ["y"])])
        found.append(dagexec.compile(Model(name="closing", net=net, outputs=("y",)), optimize=False, net_type=net_type))
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert "an operator cannot close the executor that runs it" in str(results[0])
        found[0].close()


def test_statistics_show_themselves_in_lines_for_people() -> None:
    with dagexec.compile(doubled_model(), num_workers=1, max_batch=4) as executor:
        assert repr(executor.statistics()).splitlines()[:2] == [
            "replicas   1: 0 running, 0 queued, 0 awaiting admission",
            "requests   none has ended",
        ]
        executor.run({"x": rows(1.0)})
        with pytest.raises(FeedError):
            executor.run({})
        statistics = executor.statistics()
    lines = repr(statistics).splitlines()
    assert "requests   1 completed, 1 invalid" in lines
    assert "batches    1 of 2 rows" in lines
    assert statistics.run_time.median is not None
    assert f"  running  median {statistics.run_time.median * 1e3:.3g} ms, 99th percentile" in repr(statistics)
    assert max(map(len, lines)) < 100


def test_every_unknown_input_is_told_which_is_meant() -> None:
    model = doubled_model()
    two = dataclasses.replace(model, inputs={**model.inputs, "mask": model.inputs["x"]})
    with pytest.raises(FeedError, match=r"did you mean 'mask'\?; did you mean 'x'\?$"):
        check_feeds(two, {"mast": rows(1.0), "xs": rows(1.0)}, {"x", "mask"})
