"""Every public call that is awaited is cancelled at each of its awaits, one after another, on asyncio and on trio.

Afterwards nothing runs on, nothing is held or lost, and the next call gives the right bytes.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager

import anyio
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import dagexec
from dagexec.binding.io_binding import Array
from dagexec.cluster.deployment import Deployment
from dagexec.cluster.dispatcher import Dispatcher
from dagexec.cluster.link import Answer, Started
from dagexec.cluster.state import DeploymentState
from dagexec.devices.sim import simulated
from dagexec.errors import ClosedError
from dagexec.executor.executor import Executor
from dagexec.executor.sessions.session import Session
from dagexec.executor.source.types import GivenTypes
from dagexec.pipelines import Pipeline
from dagexec.server.config import GenerationConfig, ModelConfig, SequenceConfig, ServerConfig
from dagexec.server.generation import Generator
from dagexec.server.inference import InferenceRequest, RequestError
from dagexec.server.repository import Repository
from dagexec.server.sequences import Place, Sequences
from tests.failures.acting import until
from tests.failures.steps import MOMENTS, Moment, Outcome, cancelled_at
from tests.held import doubled_model

X = np.arange(6, dtype=np.float32).reshape(2, 3)
RIGHT = {"y": (X + X).tobytes()}
MOST = 400  # steps, which no call here has

Call = Callable[[], Awaitable[object]]
After = Callable[[Outcome], Awaitable[object]]


def is_right(outputs: Mapping[str, Array]) -> None:
    assert {name: array.tobytes() for name, array in outputs.items()} == RIGHT


async def in_use(executor: Executor) -> None:
    """It is idle, and serves."""
    now = executor.statistics()
    assert (now.running, now.queued) == (0, 0)
    until(lambda: executor.statistics().busy_workers == 0)  # a thread that found nothing to do is on its way out
    is_right(await executor.run_async({"x": X}))


@asynccontextmanager
async def running(**options: object) -> AsyncIterator[tuple[Call, After]]:
    """One run."""
    timeout = options.pop("timeout", None)
    with dagexec.compile(doubled_model(), optimize=False, **options) as executor:  # type: ignore[arg-type]
        out = {"y": np.zeros_like(X)}

        async def after(outcome: Outcome) -> None:
            if not outcome.cancelled:
                is_right(outcome.result)  # type: ignore[arg-type]
            out["y"][:] = 7  # nobody writes to it any more
            await in_use(executor)
            assert (out["y"] == 7).all()

        yield functools.partial(executor.run_async, {"x": X}, timeout=timeout, out=out), after


@asynccontextmanager
async def among_others(max_batch: int) -> AsyncIterator[tuple[Call, After]]:
    """One of three requests, which wait for one replica or are joined."""
    with dagexec.compile(doubled_model(), optimize=False, max_batch=max_batch, replicas=1) as executor:
        others: list[Mapping[str, Array]] = []

        async def other() -> None:
            others.append(await executor.run_async({"x": X}))

        async with anyio.create_task_group() as tasks:

            async def call() -> object:
                tasks.start_soon(other)
                tasks.start_soon(other)
                return await executor.run_async({"x": X})

            async def after(outcome: Outcome) -> None:
                while len(others) < 2:
                    await anyio.lowlevel.checkpoint()
                for outputs in others:
                    is_right(outputs)
                await in_use(executor)

            yield call, after


@asynccontextmanager
async def compiling(enter: bool) -> AsyncIterator[tuple[Call, After]]:
    """A compilation; with `enter`, a block that uses what was compiled."""

    async def block() -> object:
        async with dagexec.compile_async(doubled_model()) as executor:
            return await executor.run_async({"x": X})

    async def call() -> object:
        return await (block() if enter else dagexec.compile_async(doubled_model()))

    async def after(outcome: Outcome) -> None:
        if isinstance(outcome.result, Executor):
            await in_use(outcome.result)
            await outcome.result.aclose()
        elif not outcome.cancelled:
            is_right(outcome.result)  # type: ignore[arg-type]

    yield call, after


@asynccontextmanager
async def ending(how: str) -> AsyncIterator[tuple[Call, After]]:
    """The end of an executor that has a request."""
    executor = dagexec.compile(doubled_model(), optimize=False, net_type="dag", num_workers=1)
    answers: list[Mapping[str, Array]] = []

    async def request() -> None:
        answers.append(await executor.run_async({"x": X}))

    async with anyio.create_task_group() as tasks:

        async def call() -> object:
            return await (executor.drain_async() if how == "drain" else executor.aclose(drain=True)) or "closed"

        async def after(outcome: Outcome) -> None:
            with pytest.raises(ClosedError):
                await executor.run_async({"x": X})
            await executor.aclose(drain=True)

        tasks.start_soon(request)
        await anyio.wait_all_tasks_blocked()
        yield call, after
    is_right(answers[0])


class Node:
    """A link to an executor in this process."""

    place = "here"

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def start(self, done: Callable[[Started], object]) -> None:
        done(None)

    def run(
        self,
        feeds: Mapping[str, Array],
        names: Sequence[str],
        priority: int,
        timeout: float | None,
        done: Callable[[Answer], object],
    ) -> Node:
        threading.Thread(target=lambda: done(self._executor.run(feeds, outputs=names, priority=priority))).start()
        return self

    def cancel(self) -> None:
        """It ends soon."""

    def ask(self, done: Callable[[], object]) -> None:
        done()

    def stop(self) -> None:
        """The test ends it."""


@asynccontextmanager
async def deployed(how: str) -> AsyncIterator[tuple[Call, After]]:
    """A request to a deployment, or its end."""
    model = doubled_model()
    released: list[int] = []
    with dagexec.compile(model, optimize=False) as executor:
        dispatcher = Dispatcher("doubled", DeploymentState("doubled", max_outstanding=2), lambda _: Node(executor))
        deployment = Deployment(model, GivenTypes.of(model), dispatcher, lambda: released.append(1))
        dispatcher.add_members(2)
        assert dispatcher.wait_until_started(60)

        async def call() -> object:
            if how == "run":
                return await deployment.run_async({"x": X})
            return await (deployment.drain_async() if how == "drain" else deployment.aclose()) or "closed"

        async def after(outcome: Outcome) -> None:
            if how == "run":
                is_right(await deployment.run_async({"x": X}))
                assert dispatcher.wait_until_empty(60)
                assert deployment.statistics().running == 0
            await deployment.aclose()
            assert released == [1]

        yield call, after


@asynccontextmanager
async def served(what: str) -> AsyncIterator[tuple[Call, After]]:
    """A request to a server's models, or a change of them; what was compiled is closed at the end."""
    made: list[Executor] = []

    async def load(config: ModelConfig, source: object) -> Executor:
        made.append(await dagexec.compile_async(doubled_model(), optimize=False))
        return made[-1]

    config = ServerConfig(models={"m": ModelConfig(name="m", source=doubled_model())})
    repository = Repository(config) if what == "load and warm up" else Repository(config, load_runner=load)
    await repository.load("m")
    request = InferenceRequest(model="m", inputs={"x": X})

    async def call() -> object:
        if what == "infer":
            return await repository.infer(request)
        if what == "drain":
            return await repository.drain() or "drained"
        return await (repository.unload("m") if what == "unload" else repository.load("m")) or "changed"

    async def after(outcome: Outcome) -> None:
        if what != "drain":
            if what == "unload":
                await repository.load("m")
            is_right((await repository.infer(request)).outputs)
            await repository.drain()
        for executor in made:
            with pytest.raises(ClosedError):
                await executor.run_async({"x": X})

    yield call, after


@asynccontextmanager
async def in_a_sequence() -> AsyncIterator[tuple[Call, After]]:
    """The first of a sequence's requests, with another that waits for it."""
    place, x = Place(7, is_first=True, is_last=False), np.ones(1, np.float32)
    with dagexec.compile(adding_model(), optimize=False) as executor:
        sequences = Sequences("m", SequenceConfig(), executor.session, time.monotonic)

        async def ask(place: Place) -> Array:
            return (await sequences.run(place, {"x": x}, outputs=["new_total"]))["new_total"]

        async def after(outcome: Outcome) -> None:
            assert sequences.open == (0 if outcome.cancelled else 1)
            if outcome.cancelled:
                with pytest.raises(RequestError, match="is not open"):
                    await ask(Place(7, is_first=False, is_last=False))
                await ask(place)
            assert (await ask(Place(7, is_first=False, is_last=True)) == 2).all()
            assert sequences.open == executor.statistics().running == 0

        yield functools.partial(ask, place), after


@asynccontextmanager
async def generating() -> AsyncIterator[tuple[Call, After]]:
    """Three tokens."""
    config = GenerationConfig(input="x", output="new_total")
    with dagexec.compile(adding_model(), optimize=False) as executor:
        opened: list[Session] = []

        def session() -> Session:
            opened.append(executor.session())
            return opened[-1]

        async def call() -> list[int]:
            prompt = {"x": np.float32([1, 2])}
            tokens = Generator(config, executor.inputs, session).tokens(prompt, 3, timeout=60.0, priority=0)
            async with aclosing(tokens):
                return [token async for token, _ in tokens]

        async def after(outcome: Outcome) -> None:
            assert all(not one.state for one in opened)
            if not outcome.cancelled:
                assert outcome.result == [0, 0, 0]
            assert await call() == [0, 0, 0]

        yield call, after


def adding_model() -> onnx.ModelProto:
    """The sum of all x so far."""
    x, total, new = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "total", "new_total")
    )
    add = helper.make_node("Add", ["x", "total"], ["new_total"])
    graph = helper.make_graph([add], "adding", [x, total], [new])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@asynccontextmanager
async def piped() -> AsyncIterator[tuple[Call, After]]:
    """A pipeline of a model and a Python step."""
    pipeline = Pipeline("doubled")
    x = pipeline.input("x", "float32", (2, 3))
    pipeline.output("y", pipeline.python("double", lambda one: one + one, x, "float32[2, 3]"))
    with dagexec.compile(pipeline, net_type="dag", num_workers=2) as executor:

        async def after(outcome: Outcome) -> None:
            await in_use(executor)

        yield functools.partial(executor.run_async, {"x": X}), after


@asynccontextmanager
async def on_a_device() -> AsyncIterator[tuple[Call, After]]:
    """One run on the simulated device."""
    with simulated("sim:0"):
        async with running(net_type="async_dag", num_workers=2, device="sim:0") as scenario:
            yield scenario


SCENARIOS = {
    "run_async, dag": functools.partial(running, net_type="dag", num_workers=2, replicas=2),
    "run_async, simple": functools.partial(running, net_type="simple"),
    "run_async, with a timeout": functools.partial(running, net_type="dag", num_workers=2, timeout=60.0),
    "run_async, on a device": on_a_device,
    "run_async, in the queue": functools.partial(among_others, max_batch=1),
    "run_async, joined": functools.partial(among_others, max_batch=8),
    "run_async, of a pipeline": piped,
    "compile_async": functools.partial(compiling, enter=False),
    "async with compile_async": functools.partial(compiling, enter=True),
    "Executor.aclose": functools.partial(ending, "close"),
    "Executor.drain_async": functools.partial(ending, "drain"),
    "Deployment.run_async": functools.partial(deployed, "run"),
    "Deployment.aclose": functools.partial(deployed, "close"),
    "Deployment.drain_async": functools.partial(deployed, "drain"),
    "Repository.infer": functools.partial(served, "infer"),
    "Sequences.run": in_a_sequence,
    "Generator.tokens": generating,
    "Repository.load": functools.partial(served, "load"),
    "Repository.load, as it is": functools.partial(served, "load and warm up"),
    "Repository.unload": functools.partial(served, "unload"),
    "Repository.drain": functools.partial(served, "drain"),
}


async def cancelled_at_each(name: str, moment: Moment) -> list[Outcome]:
    """How the call ended, cancelled at its first step, its second, and so on."""
    outcomes: list[Outcome] = []
    while len(outcomes) < MOST:
        with anyio.fail_after(60):
            async with SCENARIOS[name]() as (call, after):
                outcomes.append(await cancelled_at(call, len(outcomes) + 1, moment))
                await after(outcomes[-1])
        if not outcomes[-1].reached:
            break
    return outcomes


@pytest.mark.parametrize(
    "moment", [MOMENTS[0], *(pytest.param(moment, marks=pytest.mark.slow) for moment in MOMENTS[1:])]
)
@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_call_that_is_cancelled_at_any_await_leaves_nothing_and_the_next_one_is_right(
    name: str, moment: Moment
) -> None:
    outcomes = await cancelled_at_each(name, moment)
    assert 1 <= len(outcomes) < MOST
    assert outcomes[0].reached
    assert not outcomes[-1].cancelled
