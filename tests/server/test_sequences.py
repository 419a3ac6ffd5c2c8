"""Sequences of requests: what is kept between them, who waits for whom, and what ends them."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from dagexec.errors import FeedError, SettingError
from dagexec.server.config import GenerationConfig, ModelConfig, SequenceConfig, ServerConfig
from dagexec.server.inference import InferenceRequest, RequestError
from dagexec.server.repository import Repository
from dagexec.server.sequences import Place, place_of
from tests.held import doubled_model
from tests.server.runners import AddingRunner, HeldRunner, Loads


class Clock:
    """One that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def repository_with(
    runner: HeldRunner, clock: Clock | None = None, timeout: float | None = None, **settings: Any
) -> Repository:
    model = ModelConfig(name="m", source="m.onnx", timeout=timeout, sequences=SequenceConfig(**settings))
    loads = Loads(runner)
    repository = Repository(ServerConfig(models={"m": model}), load_runner=loads, clock=clock or Clock())
    assert await repository.load_all() == {}
    return repository


def asked(value: float, sequence_id: int | str, **parameters: Any) -> InferenceRequest:
    x = np.full((1, 3), value, np.float32)
    return InferenceRequest(model="m", inputs={"x": x}, parameters={"sequence_id": sequence_id, **parameters})


def first(value: float, sequence_id: int | str = 7, **parameters: Any) -> InferenceRequest:
    return asked(value, sequence_id, sequence_start=True, **parameters)


def last(value: float, sequence_id: int | str = 7) -> InferenceRequest:
    return asked(value, sequence_id, sequence_end=True)


async def sum_of(repository: Repository, request: InferenceRequest) -> float:
    return float((await repository.infer(request)).outputs["y"][0, 0])


async def refused(repository: Repository, request: InferenceRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await repository.infer(request)
    return caught.value


def open_sequences(repository: Repository) -> int:
    [version] = repository.loaded()
    return version.sequences.open


class Asking:
    """Requests whose answers are awaited meanwhile, in the order of `ask`."""

    def __init__(self, repository: Repository, tasks: anyio.abc.TaskGroup) -> None:
        self._repository = repository
        self._tasks = tasks
        self.answers: dict[str, float | int] = {}
        """By name: a sum, or the status of an error."""

    async def ask(self, name: str, request: InferenceRequest) -> anyio.CancelScope:
        """Begin; the scope cancels it."""
        scope = anyio.CancelScope()

        async def run() -> None:
            with scope:
                try:
                    self.answers[name] = await sum_of(self._repository, request)
                except RequestError as error:
                    self.answers[name] = error.status

        self._tasks.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        return scope


async def test_sequences_keep_what_their_requests_leave_and_do_not_see_each_other() -> None:
    runner = AddingRunner()
    repository = await repository_with(runner)
    for identity in (7, "7", -7):
        assert await sum_of(repository, first(1, identity)) == 1
    for total in (3, 5):
        for identity in (7, "7", -7):
            assert await sum_of(repository, asked(2, identity)) == total
    assert open_sequences(repository) == runner.open == 3
    for identity in (7, "7", -7):
        assert await sum_of(repository, last(2, identity)) == 7
    assert open_sequences(repository) == runner.open == 0


async def test_a_request_of_no_sequence_runs_as_before() -> None:
    runner = AddingRunner()
    repository = await repository_with(runner)
    for identity in (0, ""):
        assert await sum_of(repository, asked(2, identity)) == 2
    assert not runner.sessions


async def test_the_first_request_says_so_and_what_is_over_does_not_go_on() -> None:
    runner = AddingRunner()
    repository = await repository_with(runner)
    error = await refused(repository, asked(1, 7))
    assert error.status == 400
    assert "sequence 7 is not open: the first request of a sequence has sequence_start" in str(error)
    await repository.infer(first(1))
    await repository.infer(last(1))
    assert (await refused(repository, asked(1, 7))).status == 400
    assert await sum_of(repository, first(4, sequence_end=True)) == 4
    assert (await refused(repository, last(1))).status == 400
    assert open_sequences(repository) == runner.open == 0


async def test_a_sequence_that_is_begun_again_begins_anew() -> None:
    runner = AddingRunner()
    repository = await repository_with(runner)
    assert await sum_of(repository, first(1)) == 1
    assert await sum_of(repository, first(5)) == 5
    assert await sum_of(repository, asked(1, 7)) == 6
    assert open_sequences(repository) == runner.open == 1


async def test_a_request_that_fails_changes_nothing_but_a_first_one_ends_what_was_before() -> None:
    runner = AddingRunner()
    repository = await repository_with(runner)
    await repository.infer(first(1))
    runner.error = FeedError("wrong")
    for request in (asked(5, 7), last(5)):
        assert (await refused(repository, request)).status == 400
    runner.error = None
    assert await sum_of(repository, asked(1, 7)) == 2
    runner.error = FeedError("wrong")
    assert (await refused(repository, first(5))).status == 400
    runner.error = None
    assert "is not open" in str(await refused(repository, asked(1, 7)))
    assert open_sequences(repository) == runner.open == 0


async def test_requests_of_a_sequence_run_one_after_another_and_others_meanwhile() -> None:
    runner = AddingRunner(held=True)
    repository = await repository_with(runner)
    async with anyio.create_task_group() as tasks:
        asking = Asking(repository, tasks)
        await asking.ask("a1", first(1))
        await asking.ask("a2", asked(10, 7))
        await asking.ask("b1", first(2, "b"))
        await asking.ask("a3", last(100))
        assert runner.inside == 2
        runner.go_on.set()
    assert asking.answers == {"a1": 1, "a2": 11, "a3": 111, "b1": 2}
    assert [session.seen for session in runner.sessions] == [[1, 10, 100], [2]]
    assert open_sequences(repository) == runner.open == 1


async def test_a_sequence_that_is_idle_for_too_long_ends() -> None:
    clock, runner = Clock(), AddingRunner()
    repository = await repository_with(runner, clock, idle_seconds=10)
    await repository.infer(first(1, "a"))
    clock.now += 6
    await repository.infer(first(1, "b"))
    clock.now += 3.9
    await repository.infer(asked(1, "a"))
    clock.now += 6.1
    repository.end_idle_sequences()
    [version] = repository.loaded()
    assert (open_sequences(repository), runner.open, version.sequences.expired) == (1, 1, 1)
    assert "is not open" in str(await refused(repository, asked(1, "b")))
    assert await sum_of(repository, asked(1, "a")) == 3
    clock.now += 10
    error = await refused(repository, asked(1, "a"))  # though nobody has looked meanwhile
    assert "idle for 10 seconds" in str(error)
    assert (open_sequences(repository), runner.open, version.sequences.expired) == (0, 0, 2)


async def test_a_sequence_with_a_request_is_not_idle() -> None:
    clock, runner = Clock(), AddingRunner(held=True)
    repository = await repository_with(runner, clock, idle_seconds=10)
    async with anyio.create_task_group() as tasks:
        asking = Asking(repository, tasks)
        await asking.ask("a", first(1))
        clock.now += 100
        repository.end_idle_sequences()
        runner.go_on.set()
    clock.now += 9
    assert await sum_of(repository, asked(1, 7)) == 2


async def test_no_more_sequences_than_allowed_are_open() -> None:
    clock, runner = Clock(), AddingRunner()
    repository = await repository_with(runner, clock, idle_seconds=10, max_open=2)
    await repository.infer(first(1, "a"))
    clock.now += 6
    await repository.infer(first(1, "b"))
    error = await refused(repository, first(1, "c"))
    assert (error.status, error.retry_after, str(error)) == (503, 1, "model 'm': 2 sequences are open")
    clock.now += 6
    assert await sum_of(repository, first(1, "a")) == 1  # one that is open may begin again
    clock.now += 5
    assert await sum_of(repository, first(1, "c")) == 1  # in the place of b
    assert await sum_of(repository, last(1, "c")) == 2
    assert await sum_of(repository, first(1, "d")) == 1


async def test_no_more_requests_of_a_sequence_than_allowed_wait() -> None:
    runner = AddingRunner(held=True)
    repository = await repository_with(runner, max_queued=1)
    async with anyio.create_task_group() as tasks:
        asking = Asking(repository, tasks)
        await asking.ask("a1", first(1))
        await asking.ask("a2", asked(1, 7))
        error = await refused(repository, asked(1, 7))
        assert (error.status, error.retry_after) == (503, 1)
        runner.go_on.set()
    assert asking.answers == {"a1": 1, "a2": 2}


async def test_a_request_that_its_client_gives_up_ends_the_sequence() -> None:
    runner = AddingRunner(held=True)
    repository = await repository_with(runner)
    async with anyio.create_task_group() as tasks:
        asking = Asking(repository, tasks)
        await asking.ask("other", first(5, "other"))
        running = await asking.ask("a1", first(1))
        assert runner.inside == 2
        running.cancel()
        await anyio.wait_all_tasks_blocked()
        assert (runner.inside, runner.open, open_sequences(repository)) == (1, 1, 1)
        assert "whose client gives up a request" in str(await refused(repository, asked(1, 7)))
        runner.go_on.set()
    assert asking.answers == {"other": 5}
    assert await sum_of(repository, asked(1, "other")) == 6


async def test_those_before_one_that_is_given_up_run_those_behind_do_not_and_a_new_beginning_does() -> None:
    runner = AddingRunner(held=True)
    repository = await repository_with(runner)
    async with anyio.create_task_group() as tasks:
        asking = Asking(repository, tasks)
        await asking.ask("a1", first(1))
        await asking.ask("a2", asked(1, 7))
        waiting = await asking.ask("a3", asked(1, 7))
        await asking.ask("a4", asked(1, 7))
        await asking.ask("b1", first(10))
        await asking.ask("b2", asked(1, 7))
        waiting.cancel()
        await anyio.wait_all_tasks_blocked()
        assert (runner.inside, runner.open) == (1, 1)
        runner.go_on.set()
    assert asking.answers == {"a1": 1, "a2": 2, "a4": 400, "b1": 10, "b2": 11}
    assert open_sequences(repository) == runner.open == 1


async def test_one_given_up_behind_a_new_beginning_ends_that_too() -> None:
    runner = AddingRunner(held=True)
    repository = await repository_with(runner)
    async with anyio.create_task_group() as tasks:
        asking = Asking(repository, tasks)
        await asking.ask("a1", first(1))
        await asking.ask("b1", first(10))
        waiting = await asking.ask("b2", asked(1, 7))
        waiting.cancel()
        await asking.ask("b3", asked(1, 7))
        runner.go_on.set()
    assert asking.answers == {"a1": 1, "b1": 10, "b3": 400}
    assert open_sequences(repository) == runner.open == 0


async def test_a_request_waits_for_others_no_longer_than_its_time_and_the_sequence_goes_on() -> None:
    runner = AddingRunner(held=True)
    repository = await repository_with(runner, timeout=1000.0)
    async with anyio.create_task_group() as tasks:
        asking = Asking(repository, tasks)
        await asking.ask("a1", first(1))
        error = await refused(repository, asked(1, 7, timeout=1))
        assert error.status == 504
        assert "the requests before this one took" in str(error)
        await asking.ask("a2", asked(1, 7, priority=3))
        runner.go_on.set()
    assert asking.answers == {"a1": 1, "a2": 2}
    (first_timeout, first_priority), (left, priority) = runner.calls
    assert (first_priority, priority) == (0, -2)
    assert first_timeout is not None
    assert left is not None
    assert 0 < left < 1000


async def test_a_model_that_is_unloaded_ends_its_sequences_after_their_requests() -> None:
    runner = AddingRunner(held=True)
    repository = await repository_with(runner)
    [version] = repository.loaded()
    async with anyio.create_task_group() as tasks:
        asking = Asking(repository, tasks)
        await asking.ask("a1", first(1, "a"))
        await asking.ask("a2", asked(1, "a"))
        runner.go_on.set()
        await asking.ask("idle", first(1, "idle"))
        runner.go_on = anyio.Event()
        await asking.ask("a3", asked(1, "a"))
        tasks.start_soon(repository.unload, "m")
        await anyio.wait_all_tasks_blocked()
        assert (version.sequences.open, runner.open) == (1, 1)
        runner.go_on.set()
    assert asking.answers == {"a1": 1, "a2": 2, "a3": 3, "idle": 1}
    assert (version.sequences.open, runner.open) == (0, 0)


async def test_the_end_of_a_server_ends_requests_that_wait_in_sequences() -> None:
    runner = AddingRunner(held=True)
    repository = await repository_with(runner)
    async with anyio.create_task_group() as tasks:
        asking = Asking(repository, tasks)
        await asking.ask("a1", first(1))
        runner.go_on.set()
        await anyio.wait_all_tasks_blocked()
        runner.go_on = anyio.Event()
        await asking.ask("a2", asked(1, 7))
        await asking.ask("a3", asked(1, 7))
        await repository.drain(0)
    assert asking.answers == {"a1": 1, "a2": 503, "a3": 503}
    assert runner.open == 0


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"sequence_id": 1.5}, "'sequence_id' must be a whole number or a text of at most 128 bytes, not 1.5"),
        ({"sequence_id": True}, "'sequence_id' must be"),
        ({"sequence_id": "é" * 65}, "'sequence_id' must be"),
        ({"sequence_id": 7, "sequence_start": 1}, "'sequence_start' must be true or false, not 1"),
        ({"sequence_id": 7, "sequence_end": "yes"}, "'sequence_end' must be true or false, not 'yes'"),
        ({"sequence_start": True}, "need a sequence_id"),
        ({"sequence_id": "", "sequence_end": True}, "need a sequence_id"),
    ],
)
async def test_parameters_that_are_none_are_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        place_of(parameters)
    assert caught.value.status == 400


async def test_parameters_say_which_sequence() -> None:
    assert place_of({"priority": 1}) is place_of({"sequence_id": 0}) is place_of({"sequence_id": ""}) is None
    assert place_of({"sequence_id": "a" * 128, "sequence_end": True}) == Place("a" * 128, False, True)
    assert place_of({"sequence_id": 1 << 63, "sequence_start": True}) == Place(1 << 63, True, False)


async def test_a_model_that_keeps_nothing_has_no_sequences() -> None:
    for source in (doubled_model(), HeldRunner(1)):
        model = ModelConfig(name="m", source=None if isinstance(source, HeldRunner) else source)
        repository = Repository(ServerConfig(models={} if model.source is None else {"m": model}))
        assert await repository.load_all() == {}
        if isinstance(source, HeldRunner):
            repository.add("m", source)
        error = await refused(repository, first(1))
        assert (error.status, str(error)) == (400, "model 'm' has no sequences: it keeps nothing between requests")
        await repository.drain()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sequences": SequenceConfig(states={"x": "none"})}, "'none' is no output"),
        ({"generation": GenerationConfig(input="x", output="y")}, "generation needs states or caches"),
    ],
)
async def test_settings_that_do_not_fit_a_model_are_refused_when_it_is_loaded(
    settings: dict[str, Any], words: str
) -> None:
    model = ModelConfig(name="m", source=doubled_model(), **settings)
    errors = await Repository(ServerConfig(models={"m": model})).load_all()
    assert words in str(errors["m"])


async def test_a_deployment_keeps_no_states() -> None:
    model = ModelConfig(name="m", source="m", sequences=SequenceConfig(states={"x": "y"}))
    errors = await Repository(ServerConfig(models={"m": model}), load_runner=Loads(HeldRunner(1))).load_all()
    assert "only an executor in the server's process keeps states" in str(errors["m"])


async def test_settings_name_what_names_do_not_tell() -> None:
    model = ModelConfig(name="m", source=doubled_model(), sequences=SequenceConfig(states={"x": "y"}))
    repository = Repository(ServerConfig(models={"m": model}))
    assert await repository.load_all() == {}
    begun = {"sequence_id": 7, "sequence_start": True}
    assert await sum_of(repository, InferenceRequest(model="m", inputs={}, outputs=("y",), parameters=begun)) == 0
    await repository.drain()


def test_settings_out_of_range_are_refused() -> None:
    for wrong in (
        {"states": ["x"]},
        {"states": {"x": 1}},
        {"idle_seconds": 0},
        {"idle_seconds": float("inf")},
        {"max_open": 0},
        {"max_open": 1.5},
        {"max_queued": -1},
    ):
        with pytest.raises(SettingError, match=rf"{next(iter(wrong))}[.x]* must"):
            SequenceConfig(**wrong)  # type: ignore[arg-type]
