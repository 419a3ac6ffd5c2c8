"""Islands: what compilation puts in them, and that executors with islands behave as executors do."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import dagexec
from dagexec import foreign
from dagexec.compiler.compilation import compile_model
from dagexec.compiler.islands.regions import island_source
from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import arguments_of
from dagexec.core.proto import NetDef
from dagexec.errors import ModelFormatError
from dagexec.foreign import onnx_runtime_island, opening_islands, openvino, openvino_trial
from dagexec.options import CompileOptions
from dagexec.scheduler.hazards import check_net
from dagexec.scheduler.observe.trace import Trace
from tests.compiler.islands.nets import ANY, NETS, RUNTIMES, Array, attention, convolutions, fed, needs, reshaping
from tests.forked import in_child
from tests.held import Held
from tests.nets import temporary_operator
from tests.ops.running import operator_def


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    """Each of the runtimes that are installed."""
    needs(request.param)
    return str(request.param)


def operators(model: Model, **options: Any) -> list[str]:
    return [one.type for one in compile_model(model, CompileOptions(**options)).model.net.op]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_a_whole_net_is_one_operator_with_the_results_of_onnxruntime(runtime: str, name: str) -> None:
    make, shape = NETS[name]
    proto = make()
    model = dagexec.load_model(proto)
    assert operators(model, islands=runtime, **ANY) == ["Island"]
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    with dagexec.compile(model, islands=runtime, **ANY) as executor, dagexec.compile(model) as own:
        for sizes in (shape, (1, *shape[1:]), (3, *shape[1:]), shape):
            feeds = fed(*sizes)
            [found], [expected] = executor.run(feeds).values(), session.run(None, feeds)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(found, next(iter(own.run(feeds).values())), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_texts_of_other_lengths_are_computed_by_the_same_island(runtime: str) -> None:
    proto = attention()
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    with dagexec.compile(proto, islands=runtime, **ANY) as executor:
        for length in (5, 9, 1, 9):
            feeds = fed(2, length, 32)
            np.testing.assert_allclose(
                next(iter(executor.run(feeds).values())), session.run(None, feeds)[0], rtol=1e-5, atol=1e-5
            )


@pytest.mark.usefixtures("held")
def test_what_onnx_cannot_say_stays_between_islands() -> None:
    """A branch around it is in an island of its own, and no region is left and entered again."""
    model = with_held()
    regions = island_source(model, {}).regions()
    assert [[model.net.op[index].output[0] for index in one.operators] for one in regions] == [["a", "b"], ["d", "e"]]


def with_held() -> Model:
    """b = Relu(x w); c = Held(b), which nobody else can compute; e = Relu(b w + c)."""
    net = NetDef(
        name="held",
        op=[
            operator_def("MatMul", ["x", "w"], ["a"]), operator_def("Relu", ["a"], ["b"]),
            operator_def("Held", ["b"], ["c"]),
            operator_def("Add", ["b", "c"], ["d"]), operator_def("MatMul", ["d", "w"], ["e"]),
        ],
    )  # fmt: skip
    weights = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
    return Model("held", net, None, {"w": weights}, {"x": InputInfo(FLOAT32, (2, 40))}, ("e",))


def test_what_reads_a_shape_that_others_compute_is_in_no_island() -> None:
    """Its outputs' types do not follow from the types of its inputs."""
    net = NetDef(
        name="shaped",
        op=[
            operator_def("Shape", ["x"], ["s"]), operator_def("Reshape", ["x", "s"], ["r"]),
            operator_def("Relu", ["r"], ["y"]),
        ],
    )  # fmt: skip
    net.op[0].control_input.append("x")  # which no island has
    model = Model("shaped", net, None, {}, {"x": InputInfo(FLOAT32, (2, 3))}, ("y",))
    assert "Island" not in operators(model, islands="onnxruntime", **ANY)


@pytest.fixture
def held() -> Iterator[Held]:
    found = Held()
    with temporary_operator("Held", found, row_by_row=True):
        yield found


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_run_is_cancelled_between_two_islands(
    runtime: str, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for module, name in ((onnx_runtime_island, "_Bound"), (openvino, "_Bound")):
        kind = getattr(module, name)
        call = kind.__call__
        monkeypatch.setattr(kind, "__call__", lambda self, call=call: (ran.append("island"), call(self)))
    with dagexec.compile(with_held(), islands=runtime, net_type="dag", num_workers=1, **ANY) as executor:
        task = asyncio.create_task(executor.run_async({"x": np.ones((2, 40), np.float32)}))
        await asyncio.to_thread(held.inside.acquire)
        task.cancel()
        await asyncio.sleep(0)  # the task takes note
        held.go_on.release()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ran == ["island"]


def test_operators_of_an_application_are_not_run_to_test_islands(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    assert operators(with_held(), islands="onnxruntime") == operators(with_held())
    assert "cannot be tested" in caplog.text
    assert held.seen == []


def test_constants_are_handed_over_where_they_lie_and_small_ones_in_the_message(runtime: str) -> None:
    model = dagexec.load_model(attention())
    compiled = compile_model(model, CompileOptions(islands=runtime, **ANY))
    [island] = compiled.model.net.op
    constants = island.input[1:]
    assert {compiled.model.parameters[name].shape for name in constants} == {(32, 64), (64, 32)}
    assert all(compiled.model.parameters[name] is not None for name in constants)
    assert arguments_of(island, "").int("constants", 0) == len(constants)
    addresses = {array.ctypes.data for array in model.parameters.values()}
    assert {compiled.model.parameters[name].ctypes.data for name in constants} <= addresses


def test_a_session_has_no_more_threads_than_its_operator() -> None:
    [island] = compile_model(dagexec.load_model(attention()), CompileOptions(islands="onnxruntime", **ANY)).model.net.op
    message = foreign.parse(next(one.s for one in island.arg if one.name == "model"), "attention")
    names, random = island.input[1:], np.random.default_rng(0)
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in message.graph.input}
    constants = {name: random.standard_normal(shapes[name]).astype(np.float32) for name in names}
    kept = []
    for threads in (1, 3):
        before = len(os.listdir("/proc/self/task"))
        kept.append(foreign.open_island("onnxruntime", foreign.IslandModel(message, constants, threads), "it", ["y"]))
        assert len(os.listdir("/proc/self/task")) - before <= threads - 1


def test_openvino_is_given_the_threads_of_its_operator() -> None:
    needs("openvino")
    [island] = compile_model(dagexec.load_model(convolutions()), CompileOptions(islands="openvino", **ANY)).model.net.op
    message = foreign.parse(next(one.s for one in island.arg if one.name == "model"), "convolutions")
    random, values = np.random.default_rng(0), {value.name: value for value in message.graph.input}
    constants = {
        name: random.standard_normal([dim.dim_value for dim in values[name].type.tensor_type.shape.dim]).astype("f4")
        for name in island.input[1:]
    }
    session = openvino.OpenVinoIsland(foreign.IslandModel(message, constants, 2))
    compiled = session.compiled([(1, 3, 12, 12)])
    assert (compiled.get_property("INFERENCE_NUM_THREADS"), compiled.get_property("NUM_STREAMS")) == (2, 1)


def test_shapes_that_follow_from_shapes_are_known_within_an_island() -> None:
    proto = reshaping()
    assert operators(dagexec.load_model(proto), islands="onnxruntime", without_passes={"constant-folding"}, **ANY) == [
        "Island"
    ]
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    with dagexec.compile(proto, islands="onnxruntime", **ANY) as executor:
        for rows in (1, 3):
            [found], [expected] = executor.run(fed(rows, 4, 6)).values(), session.run(None, fed(rows, 4, 6))
            np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_accesses_of_a_net_with_islands_are_proven_to_be_ordered(runtime: str) -> None:
    with dagexec.compile(convolutions(), islands=runtime, net_type="dag", **ANY) as executor:
        executor.run(fed(2, 3, 12, 12))
        proof = check_net(executor.net())
    assert proof.holds


def test_a_trace_has_the_profile_of_an_island_as_spans_within_its_own(runtime: str) -> None:
    feeds = fed(2, 3, 12, 12)
    with dagexec.compile(convolutions(), islands=runtime, num_workers=1, **ANY) as executor:
        plain = executor.run(feeds)
        traces = [Trace(), Trace()]
        results = [executor.run(feeds, trace=trace) for trace in traces]
    for trace, result in zip(traces, results, strict=True):
        [whole] = [span for span in trace.spans if span.is_whole]
        parts = [span for span in trace.spans if span.inner is not None]
        assert any(re.search(f"{runtime} (Fused)?Conv", part.inner or "") for part in parts)
        assert all(whole.start <= part.start <= part.end <= whole.end for part in parts)
        assert [array.tobytes() for array in result.values()] == [array.tobytes() for array in plain.values()]


def test_an_executor_reads_and_writes_the_arrays_of_its_caller(runtime: str) -> None:
    with dagexec.compile(convolutions(), islands=runtime, num_workers=1, **ANY) as executor:
        [expected] = executor.run(fed(2, 3, 12, 12)).values()
        [name] = executor.model.outputs
        out = {name: np.zeros((2, 10), np.float32)}
        for _ in range(2):
            out[name][...] = 0
            assert executor.run(fed(2, 3, 12, 12), out=out)[name] is out[name]
            assert out[name].tobytes() == expected.tobytes()


def test_replicas_run_at_once_and_agree(runtime: str) -> None:
    feeds = fed(2, 3, 12, 12)
    with dagexec.compile(convolutions(), islands=runtime, replicas=2, **ANY) as executor, ThreadPoolExecutor(3) as pool:
        results = [next(iter(one.values())) for one in pool.map(executor.run, [feeds] * 6)]
    assert {array.tobytes() for array in results} == {results[0].tobytes()}


def test_a_child_has_sessions_of_its_own() -> None:
    feeds = fed(2, 3, 12, 12)
    with dagexec.compile(convolutions(), islands="onnxruntime", intra_op_threads=2, num_workers=1, **ANY) as executor:
        [expected] = executor.run(feeds).values()

        def run() -> bytes:
            executor.reopen()
            [found] = executor.run(feeds).values()
            return found.tobytes()

        assert in_child(run) == expected.tobytes()


@pytest.mark.slow
def test_in_a_child_own_kernels_compute_what_openvino_did_in_the_parent(caplog: pytest.LogCaptureFixture) -> None:
    needs("openvino")
    feeds = fed(2, 3, 12, 12)
    with dagexec.compile(convolutions(), islands="openvino", num_workers=1, **ANY) as executor:
        [expected] = executor.run(feeds).values()

        def run() -> str:
            executor.reopen()
            [found] = executor.run(feeds).values()
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
            return caplog.text

        assert "OpenVINO was in use when the process was forked" in in_child(run)


# --- promises


def test_promises_that_a_runtime_keeps_let_its_islands_in() -> None:
    assert operators(dagexec.load_model(attention()), islands="onnxruntime", shapes={"x": (2, 5, 32)}) == ["Island"]


def add_for_batch(outputs: list[Array]) -> None:
    outputs[0] += np.float32(1e-3) * outputs[0].shape[0]


def drop_nan(outputs: list[Array]) -> None:
    np.nan_to_num(outputs[0], copy=False)


@pytest.mark.parametrize(
    ("breaks", "reason", "free"),
    [
        (add_for_batch, "rows of its results depend on their batch", {"batch_invariant": False}),
        (drop_nan, "turns NaN into numbers", {"nan": "any"}),
    ],
)
def test_islands_that_break_a_promise_are_left_out_unless_nobody_asks_for_it(
    breaks: Callable[[list[Array]], None],
    reason: str,
    free: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind = onnx_runtime_island._Bound
    call = kind.__call__

    def broken(self: Any) -> None:
        call(self)
        breaks(self._outputs)

    monkeypatch.setattr(kind, "__call__", broken)
    model = dagexec.load_model(convolutions())
    options = {"islands": "onnxruntime", "shapes": {"x": (2, 3, 12, 12)}}
    assert "Island" not in operators(model, **options)
    assert reason in caplog.text
    assert operators(model, **options, **free) == ["Island"]


@pytest.mark.slow
def test_rows_of_a_fixed_batch_are_tested_by_changing_their_places(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind = onnx_runtime_island._Bound
    call = kind.__call__

    def broken(self: Any) -> None:
        call(self)
        self._outputs[0][0] += np.float32(1e-3)

    monkeypatch.setattr(kind, "__call__", broken)
    model = dagexec.load_model(convolutions())
    fixed = replace(model, inputs={"x": replace(model.inputs["x"], shape=(2, 3, 12, 12))})
    assert "Island" not in operators(fixed, islands="onnxruntime")
    assert "depend on their batch" in caplog.text


# --- failures


def test_an_island_in_a_model_file_is_refused() -> None:
    compiled = compile_model(dagexec.load_model(convolutions()), CompileOptions(islands="onnxruntime", **ANY)).model
    [island] = compiled.net.op
    next(one for one in island.arg if one.name == "model").s += b" "
    with pytest.raises(ModelFormatError, match=r"Island .*are made by dagexec.compile"), dagexec.compile(compiled):
        pass


def test_own_kernels_compute_what_a_runtime_cannot_open(
    runtime: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proto = convolutions()

    def fail(_model: object) -> None:
        raise RuntimeError("it does not like it")

    monkeypatch.setitem(opening_islands._MAKERS, runtime, fail)
    with dagexec.compile(proto, islands=runtime, **ANY) as executor:
        check_against_onnxruntime(executor, proto, 1, 2)
        [blob] = executor.model.outputs
    assert re.search(rf"Island .* of net 'net'.*{runtime} cannot compute '{blob}'.*it does not like it", caplog.text)


def check_against_onnxruntime(executor: dagexec.Executor, proto: onnx.ModelProto, *batches: int) -> None:
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    for count in batches:
        feeds = fed(count, 3, 12, 12)
        [found], [expected] = executor.run(feeds).values(), session.run(None, feeds)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_own_kernels_compute_the_shapes_that_a_runtime_refuses_in_a_run(
    runtime: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind = {"onnxruntime": onnx_runtime_island, "openvino": openvino}[runtime]._Bound
    call = kind.__call__
    ran: list[int] = []

    def fails(self: Any) -> None:
        if len(self._inputs[0]) == 3:
            raise RuntimeError("out of luck")
        ran.append(len(self._inputs[0]))
        call(self)

    monkeypatch.setattr(kind, "__call__", fails)
    proto = convolutions()
    with dagexec.compile(proto, islands=runtime, num_workers=1, **ANY) as executor:
        check_against_onnxruntime(executor, proto, 1, 3, 3, 1)
        with_arrays = {name: np.zeros((3, 10), np.float32) for name in executor.model.outputs}
        executor.run(fed(3, 3, 12, 12), out=with_arrays)
        [expected] = executor.run(fed(3, 3, 12, 12)).values()
        assert next(iter(with_arrays.values())).tobytes() == expected.tobytes()
        trace = Trace()
        executor.run(fed(3, 3, 12, 12), trace=trace)
    assert set(ran) == {1}
    assert re.search(r"Island .* of net 'net'.*out of luck", caplog.text)


def test_a_candidate_that_its_runtime_refuses_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_model: object) -> None:
        raise RuntimeError("it does not like it")

    monkeypatch.setitem(opening_islands._MAKERS, "onnxruntime", fail)
    assert "Island" not in operators(dagexec.load_model(convolutions()), islands="onnxruntime")


# --- trials in a process of their own


def given_model(threads: int = 1) -> foreign.IslandModel:
    """The island of the net of convolutions, as a session gets it."""
    model = compile_model(dagexec.load_model(convolutions()), CompileOptions(islands="openvino", **ANY)).model
    [island] = model.net.op
    message = foreign.parse(next(one.s for one in island.arg if one.name == "model"), "convolutions")
    constants = {name: model.parameters[name] for name in island.input if name in model.parameters}
    return foreign.IslandModel(message, constants, threads)


@pytest.mark.slow
def test_with_a_limited_instruction_set_openvino_is_tried_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("openvino")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(openvino_trial, "_survived", {})
    openvino_trial.survive(given_model(), ((2, 3, 12, 12),), is_static=True)
    with pytest.raises(RuntimeError, match=r"status 1.*shape"):
        openvino_trial.survive(given_model(), ((2, 3, 12),), is_static=True)


@pytest.mark.parametrize("isa", ["AVX2", "DEFAULT"])
def test_own_kernels_compute_what_ends_that_process(
    isa: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needs("openvino")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    monkeypatch.setattr(openvino_trial, "_survived", {})
    monkeypatch.setattr(openvino_trial, "_COMMAND", ["-c", "import os; os.kill(os.getpid(), 11)"])
    proto = convolutions()
    with dagexec.compile(proto, islands="openvino", num_workers=1, **ANY) as executor:
        check_against_onnxruntime(executor, proto, 1, 2)
    assert ("ended a process of its own (signal 11)" in caplog.text) == (isa == "AVX2")
