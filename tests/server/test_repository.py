"""Models come, change and go while requests are in service."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import dagexec
from dagexec.errors import FeedError, ModelFormatError, OperatorError, QueueFullError, RunTimeoutError
from dagexec.options import CompileOptions
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.inference import InferenceRequest, RequestError
from dagexec.server.repository import Outcome, Repository
from dagexec.server.repository_state import ModelState
from tests.held import doubled_model
from tests.server.runners import HeldRunner, Loads, repository_of

X = np.float32([[1, 2, 3]])
FLOATS = helper.make_tensor_type_proto(TensorProto.FLOAT, [None, 3])


def asked(model: str = "m", **fields: object) -> InferenceRequest:
    return InferenceRequest(model=model, inputs={"x": X}, **fields)  # type: ignore[arg-type]


async def refused(repository: Repository, request: InferenceRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await repository.infer(request)
    return caught.value


async def test_requests_run_on_the_model_that_they_name() -> None:
    loads = Loads()
    models = {name: ModelConfig(name=name, source=name) for name in ("a", "b")}
    repository = repository_of(loads, **models)
    assert not repository.is_ready()
    assert await repository.load_all() == {}
    assert repository.is_ready()
    response = await repository.infer(asked("b", id="seven"))
    assert (response.model, response.version, response.id) == ("b", "1", "seven")
    np.testing.assert_array_equal(response.outputs["y"], X + 2)
    np.testing.assert_array_equal((await repository.infer(asked("a", version="1"))).outputs["y"], X + 1)


async def test_what_is_not_there_is_not_found() -> None:
    repository = repository_of(Loads())
    error = await refused(repository, asked())
    assert error.status == 503
    await repository.load_all()
    assert (await refused(repository, asked("other"))).status == 404
    error = await refused(repository, asked(version="2"))
    assert error.status == 404
    assert "has no version '2'" in str(error)
    assert (await refused(repository, asked(outputs=("x",)))).status == 400
    assert not repository.is_model_ready("m", "2")
    assert not repository.is_model_ready("other")
    assert repository.is_model_ready("m")


@pytest.mark.parametrize(
    ("raised", "status", "retries"),
    [
        (FeedError("net 'm': input 'x'"), 400, False),
        (QueueFullError("full"), 503, True),
        (RunTimeoutError("late"), 504, False),
        (OperatorError("Relu failed"), 500, False),
        (ZeroDivisionError("secret"), 500, False),
    ],
)
async def test_errors_have_the_status_that_says_whose_fault_they_are(
    raised: Exception, status: int, retries: bool
) -> None:
    loads = Loads()
    repository = repository_of(loads)
    await repository.load_all()
    loads.made[0].error = raised
    error = await refused(repository, asked())
    assert error.status == status
    assert (error.retry_after is not None) == retries
    assert str(error) == (str(raised) if isinstance(raised, dagexec.errors.DagexecError) else "internal error")


async def test_a_model_that_does_not_load_leaves_the_others_serving() -> None:
    loads = Loads(ModelFormatError("torn"), HeldRunner(2))
    models = {name: ModelConfig(name=name, source=name) for name in ("torn", "whole")}
    repository = repository_of(loads, **models)
    assert list(await repository.load_all()) == ["torn"]
    assert not repository.is_ready()
    error = await refused(repository, asked("torn"))
    assert (error.status, error.retry_after) == (503, None)
    assert "torn" in str(error)
    await repository.infer(asked("whole"))
    assert repository.index() == [
        ModelState("torn", "", "UNAVAILABLE", "could not be loaded: torn"),
        ModelState("whole", "1", "READY"),
    ]
    assert repository.index(ready=True) == [ModelState("whole", "1", "READY")]
    await repository.load("torn")
    assert repository.is_ready()


async def test_a_new_version_takes_over_between_requests_and_the_old_one_ends_with_its_last() -> None:
    old = HeldRunner(1, held=True)
    repository = repository_of(Loads(old, HeldRunner(2)))
    await repository.load_all()
    found: dict[str, float] = {}

    async def infer() -> None:
        found["old"] = (await repository.infer(asked())).outputs["y"][0, 0]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(infer)
        await old.entered.wait()
        tasks.start_soon(repository.load, "m")
        while repository.loaded()[0].runner is old:
            await anyio.lowlevel.checkpoint()
        assert (await repository.infer(asked())).outputs["y"][0, 0] == 3
        assert not old.closed
        old.go_on.set()
    assert found == {"old": 2}
    assert old.closed


async def test_a_reload_that_fails_changes_nothing() -> None:
    loads = Loads(HeldRunner(1), ModelFormatError("torn"))
    repository = repository_of(loads)
    await repository.load_all()
    with pytest.raises(RequestError, match="torn") as caught:
        await repository.load("m")
    assert caught.value.status == 500
    assert repository.is_ready()
    assert (await repository.infer(asked())).outputs["y"][0, 0] == 2


async def test_what_an_old_version_does_not_finish_in_time_ends() -> None:
    old = HeldRunner(1, held=True)
    config = ServerConfig(models={"m": ModelConfig(name="m", source="m")}, drain_seconds=0)
    repository = Repository(config, load_runner=Loads(old))
    await repository.load_all()
    found: list[RequestError] = []

    async def infer() -> None:
        found.append(await refused(repository, asked()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(infer)
        await old.entered.wait()
        await repository.unload("m")
    assert [error.status for error in found] == [503]
    assert repository.index() == [ModelState("m", "", "UNAVAILABLE", "unloaded")]
    assert repository.is_ready()  # nobody wants it
    await repository.load("m")
    assert repository.index() == [ModelState("m", "1", "READY")]


async def test_the_newest_folder_of_versions_is_served(tmp_path: Path) -> None:
    for version in ("2", "10"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "model.onnx").touch()
    (tmp_path / "notes").mkdir()
    loads = Loads()
    repository = repository_of(loads, m=ModelConfig(name="m", source=tmp_path))
    await repository.load_all()
    assert repository.metadata("m").versions == ("10",)
    (tmp_path / "11").mkdir()
    await repository.load("m")
    assert repository.metadata("m").versions == ("11",)
    (tmp_path / "12").mkdir()
    for name in ("model.onnx", "model.dagexec"):
        (tmp_path / "12" / name).touch()
    await repository.load("m")
    assert loads.sources == [tmp_path / "10" / "model.onnx", tmp_path / "11", tmp_path / "12" / "model.dagexec"]
    assert (await refused(repository, asked(version="10"))).status == 404
    assert loads.made[0].closed


async def test_a_load_may_change_settings_but_not_the_source() -> None:
    loads = Loads()
    repository = repository_of(loads)
    await repository.load_all()
    await repository.load("m", {"config": json.dumps({"max_batch": 3, "timeout": 2.5, "shapes": {"x": [2, 3]}})})
    assert (loads.configs[1].options.max_batch, loads.configs[1].timeout) == (3, 2.5)
    assert loads.configs[1].options.when_full == "reject"
    for parameters in (
        {"config": '{"source": "/etc/passwd"}'},
        {"config": '{"cluster": {"address": "ray://elsewhere"}}'},
        {"config": "["},
        {"config": '{"shapes": {"x": [1099511627776, 32]}}'},
        {"config": '{"shapes": {"x": [32768, 32768]}}'},
        {"config": '{"shapes": {"x": [-1]}}'},
        {"config": '{"warm_start": {"x": [1099511627776, 32]}}'},
        {"config": '{"replicas": 4000}'},
        {"config": '{"num_workers": 4000}'},
        {"config": '{"max_queued": 1e9}'},
        {"config": '{"max_batch": 1099511627776}'},
        {"config": '{"tuning_seconds": 1e9}'},
        {"config": '{"timeout": NaN}'},
        {"file:1/model.onnx": "AAAA"},
    ):
        with pytest.raises(RequestError) as caught:
            await repository.load("m", parameters)
        assert caught.value.status == 400
    assert len(loads.made) == 2


async def test_timeout_and_priority_are_the_shorter_and_what_the_configuration_allows() -> None:
    loads = Loads()
    repository = repository_of(loads, m=ModelConfig(name="m", source="m", timeout=2.0, priority=5, priority_level=3))
    await repository.load_all()
    for parameters in ({}, {"timeout": 500_000}, {"timeout": 9_000_000}, {"priority": 1}, {"priority": 7}):
        await repository.infer(asked(parameters=parameters))
    assert loads.made[0].calls == [(2.0, 5), (0.5, 5), (2.0, 5), (2.0, 7), (2.0, 1)]
    for parameters in ({"timeout": -1}, {"priority": 1.5}, {"priority": True}, {"timeout": "soon"}):
        assert (await refused(repository, asked(parameters=parameters))).status == 400


async def test_a_drain_refuses_what_is_new_and_waits_for_the_rest() -> None:
    held = HeldRunner(1, held=True)
    repository = repository_of(Loads(held))
    await repository.load_all()
    found: list[float] = []

    async def infer() -> None:
        found.append((await repository.infer(asked())).outputs["y"][0, 0])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(infer)
        await held.entered.wait()
        tasks.start_soon(repository.drain)
        while repository.is_ready():
            await anyio.lowlevel.checkpoint()
        error = await refused(repository, asked())
        assert (error.status, error.retry_after) == (503, 1)
        held.go_on.set()
    assert found == [2]
    assert held.closed


@pytest.mark.parametrize("what", ["drain", "unload"])
async def test_what_ends_a_model_waits_for_requests_of_a_version_that_was_replaced(what: str) -> None:
    old = HeldRunner(1, held=True)
    repository = repository_of(Loads(old))
    await repository.load_all()
    found: list[float] = []
    running: list[int] = []

    async def infer() -> None:
        found.append((await repository.infer(asked())).outputs["y"][0, 0])

    async def end() -> None:
        await (repository.drain() if what == "drain" else repository.unload("m"))
        running.append(old.inside)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(infer)
        await old.entered.wait()
        tasks.start_soon(repository.load, "m")
        while repository.loaded()[0].runner is old:
            await anyio.lowlevel.checkpoint()
        tasks.start_soon(end)
        await anyio.wait_all_tasks_blocked()
        assert not running
        old.go_on.set()
    assert (found, running, old.closed) == ([2], [0], True)


async def test_a_model_whose_unload_was_given_up_is_unloaded_in_the_end() -> None:
    held = HeldRunner(1, held=True)
    repository = repository_of(Loads(held))
    await repository.load_all()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(repository.infer, asked())
        await held.entered.wait()
        async with anyio.create_task_group() as clients:
            clients.start_soon(repository.unload, "m")
            while repository.loaded():
                await anyio.lowlevel.checkpoint()
            clients.cancel_scope.cancel()
            held.go_on.set()
    assert repository.index() == [ModelState("m", "", "UNAVAILABLE", "unloaded")]


class Outcomes:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Outcome]] = []

    def finished(self, model: str, version: str, outcome: Outcome, seconds: float) -> None:
        assert seconds >= 0
        self.seen.append((model, version, outcome))


async def test_every_request_has_one_outcome_and_a_cancelled_one_cancels_its_run() -> None:
    held, outcomes = HeldRunner(1, held=True), Outcomes()
    config = ServerConfig(models={"m": ModelConfig(name="m", source="m")})
    repository = Repository(config, outcomes, Loads(held))
    await repository.load_all()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(repository.infer, asked())
        await held.entered.wait()
        tasks.cancel_scope.cancel()
    assert held.cancelled == 1
    held.go_on.set()
    for held.error in (
        None,
        QueueFullError("full"),
        RunTimeoutError("late"),
        FeedError("wrong"),
        OperatorError("failed"),
    ):
        try:
            await repository.infer(asked())
        except RequestError:
            continue
    names = ["cancelled", "completed", "rejected", "timed_out", "invalid", "failed"]
    assert outcomes.seen == [("m", "1", name) for name in names]


async def test_an_executor_is_served_and_closed() -> None:
    options = CompileOptions(max_queued=4, when_full="reject")
    model = ModelConfig(name="m", source=doubled_model(), options=options)
    repository = Repository(ServerConfig(models={"m": model}))
    assert await repository.load_all() == {}
    [version] = repository.loaded()
    executor = version.runner
    assert isinstance(executor, dagexec.Executor)
    response = await repository.infer(asked())
    np.testing.assert_array_equal(response.outputs["y"], X * 2)
    metadata = repository.metadata("m")
    assert [(t.name, t.datatype, t.shape) for t in (*metadata.inputs, *metadata.outputs)] == [
        ("x", "FP32", (-1, 3)),
        ("y", "FP32", (-1, 3)),
    ]
    wrong = InferenceRequest(model="m", inputs={"x": np.zeros((1, 4), np.float32)})
    assert (await refused(repository, wrong)).status == 400
    await repository.drain()
    with pytest.raises(dagexec.errors.ClosedError):
        executor.run({"x": X})


@pytest.mark.parametrize(
    ("node", "kind", "words"),
    [
        (helper.make_node("SplitToSequence", ["x"], ["y"], axis=0), "sequence", "'y' is sequence of"),
        (helper.make_node("Optional", [], ["y"], type=FLOATS), "optional", "'y' is optional"),
    ],
)
async def test_a_result_that_the_protocol_has_no_words_for_is_refused_when_it_is_loaded(
    node: onnx.NodeProto, kind: str, words: str, tmp_path: Path
) -> None:
    """Not by every request: the model that was there before goes on serving."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 3])]
    result = helper.make_sequence_type_proto(FLOATS) if kind == "sequence" else helper.make_optional_type_proto(FLOATS)
    relu = helper.make_node("Relu", ["x"], ["y"])
    path = tmp_path / "m.onnx"
    repository = Repository(ServerConfig(models={"m": ModelConfig(name="m", source=path)}))
    for one, info in ((relu, FLOATS), (node, result)):
        graph = helper.make_graph([one], "m", inputs, [helper.make_value_info("y", info)])
        opset = helper.make_opsetid("", 17)
        onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
        if one is relu:
            assert await repository.load_all() == {}
            continue
        with pytest.raises(RequestError, match=words) as caught:
            await repository.load("m")
        assert "the Open Inference Protocol has no such tensors" in str(caught.value)
    np.testing.assert_array_equal((await repository.infer(asked())).outputs["y"], X)
    assert repository.is_ready()
    await repository.drain()


async def test_something_ready_to_run_is_served_under_a_name() -> None:
    repository = repository_of(Loads())
    await repository.load_all()
    repository.add("cluster", runner := HeldRunner(7), version="3")
    assert (await repository.infer(asked("cluster"))).version == "3"
    with pytest.raises(dagexec.errors.SettingError, match="there already"):
        repository.add("m", HeldRunner(1))
    await repository.drain()
    assert runner.closed
