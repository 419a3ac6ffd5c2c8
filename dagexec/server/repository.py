"""Repository: the models that a server has, how they are loaded and retired, and how requests get to them.

Which versions serve is decided in `repository_state`.
All of it belongs to one event loop. Whatever the transport, requests come to `infer`. A version is looked up and its
run begins without the loop turning in between, so that no request meets a version that has been retired.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import fields, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol

import anyio
import anyio.to_thread

from dagexec.cluster import deploy
from dagexec.core.spelling import did_you_mean
from dagexec.errors import DagexecError, FeedError, ModelFormatError, SettingError
from dagexec.executor.compile_async import compile_async
from dagexec.executor.requests.timeline import Timeline, current_timeline
from dagexec.executor.requests.waiting import to_the_end
from dagexec.executor.source.loading import PLAN_SUFFIX, ModelSource
from dagexec.platform.processor import available_cores
from dagexec.scheduler.observe.run_times import RunTimes
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.described import config_of, statistics_of
from dagexec.server.inference import (
    GeneratedToken,
    InferenceRequest,
    InferenceResponse,
    ModelMetadata,
    Parameter,
    RequestError,
    request_error,
)
from dagexec.server.limits import Limits
from dagexec.server.live import Json, Live
from dagexec.server.repository_state import ModelState, RepositoryState
from dagexec.server.sequences import place_of
from dagexec.server.version import PLATFORM, LoadedVersion, Runner

logger = logging.getLogger("dagexec.server")

Outcome = Literal["completed", "failed", "invalid", "rejected", "timed_out", "cancelled"]

_SERVERS_OWN = (
    *("source", "version", "allow_io", "cluster", "tuning_seconds", "operator_arguments"),
    *("sequences", "generation", "session_bytes"),
)
_MAX_RETRY_SECONDS = 60
_MAX_TIMEOUT_MICROSECONDS = 1 << 62


class Observer(Protocol):
    """What is told of requests: metrics."""

    def finished(self, model: str, version: str, outcome: Outcome, seconds: float) -> None:
        """A request to a known model is over, so long after it came."""
        ...


async def _compiled(config: ModelConfig, source: ModelSource) -> Runner:
    """A deployment, or an executor that has run once, with zeros, if the model runs with these."""
    if config.cluster is not None:
        settings = {one.name: getattr(config.cluster, one.name) for one in fields(config.cluster)}
        return await anyio.to_thread.run_sync(partial(deploy, source, config.options, **settings))
    executor = await compile_async(source, config.options)
    if config.options.warm_start is False:
        logger.info("warming up %s", config.name)
        try:
            await anyio.to_thread.run_sync(executor.warm_up, abandon_on_cancel=True)
        except DagexecError as error:
            logger.info("model %r is not warmed up: %s", config.name, str(error))
        except BaseException:
            await to_the_end(partial(executor.drain_async, timeout=0))  # which ends the run that the thread waits for
            raise
    return executor


class Repository:
    """Models by name, for one event loop (asyncio or trio).

    Call `load_all` at the start and `drain` at the end.

    Attributes:
        live: what the live page shows; None without it.
    """

    def __init__(
        self,
        config: ServerConfig,
        observer: Observer | None = None,
        load_runner: Callable[[ModelConfig, ModelSource], Awaitable[Runner]] = _compiled,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load_runner` makes what runs a source; `clock` tells how long sequences are idle."""
        self.config = config
        self._observer = observer
        self._load_runner = load_runner
        self._clock = clock
        self.live = Live() if config.page else None
        self._state = RepositoryState(config.models.values())
        self._changing = anyio.Lock()

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        """Run a model. A cancelled await cancels the run.

        Parameters of the request, as Triton has them: `timeout` in microseconds, which may shorten the model's own, 0
        for none; `priority`, a level of which 1 is the most urgent and 0 the model's default; those of a sequence
        (`sequences.place_of`).

        Raises RequestError: 400 for bad inputs, outputs or parameters, 404 for an unknown model or version, 413 for a
        run that would not fit in memory, 500 for an operator that fails, 503 (mostly with `retry_after`) for a model
        that is not ready or has its queue full, 504 when the timeout is over.
        """
        loaded = self._state.find(request.model, request.version)
        with self._in_service(loaded, request.id):
            config, place = loaded.config, None
            timeout, priority = config.timeout, config.priority
            if request.parameters:
                timeout, priority = _timeout(request.parameters, timeout), _priority(request.parameters, config)
                place = place_of(request.parameters)
            if not loaded.names.issuperset(request.outputs):
                unknown = sorted(set(request.outputs) - loaded.names)
                hint = did_you_mean(unknown[0], loaded.names)
                raise FeedError(
                    f"model {config.name!r}: unknown outputs {unknown}; it has {sorted(loaded.names)}{hint}"
                )
            run = loaded.runner.run_async if place is None else partial(loaded.sequences.run, place)
            outputs = await run(request.inputs, outputs=request.outputs or None, timeout=timeout, priority=priority)
        return InferenceResponse(model=request.model, version=loaded.version, id=request.id, outputs=outputs)

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[GeneratedToken, None]:
        """The tokens that a model generates, as its configuration says, one after another.

        Parameters of the request: `max_tokens`, 0 or no more than the configuration's; `timeout` for all tokens and
        `priority`, as in `infer`. Close the iterator (`aclosing`) to end it early. Raises RequestError as `infer`.
        """
        loaded = self._state.find(request.model, request.version)
        with self._in_service(loaded, request.id):
            config, generator = loaded.config, loaded.generator
            if generator is None:
                raise RequestError(400, f"model {config.name!r} does not generate: its settings do not say how")
            if place_of(request.parameters) is not None:
                raise RequestError(400, "a request that generates is a sequence of its own, without sequence_id")
            most = generator.config.max_tokens
            tokens = generator.tokens(
                request.inputs,
                _whole(request.parameters, "max_tokens", most) or most,
                timeout=_timeout(request.parameters, config.timeout),
                priority=_priority(request.parameters, config),
            )
            async with aclosing(tokens):
                async for token, reason in tokens:
                    yield GeneratedToken(
                        model=request.model,
                        version=loaded.version,
                        id=request.id,
                        token=token,
                        finish_reason=reason,
                    )

    @contextmanager
    def _in_service(self, loaded: LoadedVersion, id: str) -> Iterator[None]:
        """A request to this version, which is counted. Errors are turned into those that clients are told."""
        began = time.monotonic()
        outcome: Outcome = "cancelled"
        told, timeline = "", None
        if self.live is not None:
            timeline = Timeline()
            current_timeline.set(timeline)
        loaded.enter()
        try:
            yield
            outcome = "completed"
        except Exception as error:
            refused = request_error(error, self._retry_after(loaded))
            outcome, told = _outcome(refused), str(refused)
            raise refused from error
        finally:
            seconds = time.monotonic() - began
            loaded.leave(outcome == "completed", seconds)
            if self.live is not None and timeline is not None:
                current_timeline.set(None)
                self.live.slow.add(loaded.config.name, loaded.version, id, began, seconds, outcome, told, timeline)
            if self._observer is not None:
                self._observer.finished(loaded.config.name, loaded.version, outcome, seconds)

    def check_inputs(self, model: str, version: str | None, names: Iterable[str]) -> None:
        """Raise RequestError (400) for a name that is no input of a model that serves: worse than a wrong size."""
        loaded = self._state.known(model, version)
        if loaded is None:
            return
        known = {*loaded.runner.inputs, *getattr(loaded.runner, "overridable", ())}
        for name in names:
            if name not in known:
                hint = did_you_mean(name, known)
                raise RequestError(400, f"model {model!r}: unknown input {name!r:.80}; it has {sorted(known)}{hint}")

    def count_refused(self, model: str, version: str | None, error: RequestError) -> None:
        """A request was refused before `infer` was asked: it is counted with those of its model, if there is such."""
        loaded = self._state.known(model, version)
        if loaded is None:
            return
        loaded.count(False, 0.0)
        if self._observer is not None:
            self._observer.finished(model, loaded.version, _outcome(error), 0.0)

    def metadata(self, name: str, version: str | None = None) -> ModelMetadata:
        """What a model takes and gives. Raises RequestError as `infer` does."""
        loaded = self._state.find(name, version)
        versions = tuple(self._state.entry(name).versions)
        return ModelMetadata(name, versions, PLATFORM, loaded.inputs, loaded.outputs)

    def model_config(self, name: str, version: str | None = None) -> dict[str, Any]:
        """What Triton's clients are told of a model. Raises RequestError as `infer` does."""
        return config_of(self._state.find(name, version))

    def statistics(self, name: str | None = None, version: str | None = None) -> list[dict[str, Any]]:
        """Those of one version, or of all that serve. Raises RequestError as `infer` does."""
        asked = self.loaded() if not name else [self._state.find(name, version)]
        return [statistics_of(loaded) for loaded in asked]

    def live_state(self, stretch: int, request: int) -> Json:
        """What the live page shows, beyond these numbers of an earlier state (`Live.state`)."""
        assert self.live is not None
        return self.live.state(self.config.name, self._state.index(), self.loaded(), stretch, request)

    def is_ready(self) -> bool:
        """True while all models serve, but for those that clients have unloaded."""
        return self._state.is_ready()

    def is_model_ready(self, name: str, version: str | None = None) -> bool:
        """False also for a model or version that is unknown."""
        try:
            return self._state.find(name, version) is not None
        except RequestError:
            return False

    def index(self, ready: bool = False) -> list[ModelState]:
        """All versions that are loaded, and the models without any; only what serves, with `ready`."""
        return [row for row in self._state.index() if row.state == "READY" or not ready]

    def loaded(self) -> list[LoadedVersion]:
        """All versions that serve."""
        return self._state.loaded()

    def end_idle_sequences(self) -> None:
        """End sequences that have been idle for too long; to be called now and then."""
        for version in self._state.loaded():
            version.sequences.expire()

    async def load_all(self) -> dict[str, RequestError]:
        """Load every model of the configuration, and return the errors of those that could not be, by name."""
        errors = {}
        for name in self._state.names:
            try:
                await self.load(name)
            except RequestError as error:
                errors[name] = error
        return errors

    async def load(self, name: str, parameters: Mapping[str, Parameter] | None = None) -> None:
        """Load a model of the configuration, or load it again: its file, or the newest folder of its versions.

        Requests go to what was there before until all is ready; then it is retired. If the load fails, it stays.
        The parameter `config` is JSON with settings that replace the configuration's, as in its file, except those
        that are the server's own, and within its limits.

        Raises RequestError: 400 for bad parameters and for what was added, 404 for a model that the configuration does
        not have, 500 if it cannot be loaded.
        """
        known = self._state.entry(name).config
        if known.source is None:
            raise RequestError(400, f"model {name!r} has no source to load it from")
        config = _with_parameters(known, parameters or {}, self.config.limits)
        async with self._changing:
            self._state.loading(name)
            try:
                loaded = await self._load(config)
            except Exception as error:
                reason = f"could not be loaded: {error}"
                self._state.not_loaded(name, reason)
                logger.error("model %r %s", name, reason, exc_info=not isinstance(error, DagexecError))
                raise _load_error(name, error) from error
            except BaseException:
                self._state.not_loaded(name, "loading was cancelled")
                raise
            old = self._state.has_loaded(name, config, loaded)
        logger.info("model %r: version %s is ready", name, loaded.version)
        await self._retire(old)

    async def unload(self, name: str) -> None:
        """Take a model out of service, and return when its running requests are over.

        Raises RequestError: 404 for a model that the configuration does not have.
        """
        self._state.entry(name)
        async with self._changing:
            try:
                await self._retire(self._state.unloading(name))
            finally:
                self._state.unloaded(name)
        logger.info("model %r is unloaded", name)

    def check_control(self, parameters: Mapping[str, Parameter] | None = None) -> None:
        """Raise RequestError (403) where clients may not load and unload models, or not with these parameters."""
        if not self.config.control:
            raise RequestError(403, "clients may not load or unload models of this server (its setting `control`)")
        if parameters and "config" in parameters and not self.config.control_settings:
            raise RequestError(403, "clients may not change settings of models (the server's `control_settings`)")

    def add(self, name: str, runner: Runner, version: str = "1", **settings: Any) -> None:
        """Serve something that is ready to run, such as a deployment on a cluster. `drain` closes it.

        `settings` are a model's, as a file has them. Raises SettingError for a name that is taken, for wrong settings,
        and for inputs that the protocol has no words for.
        """
        self._state.check_new(name)
        config = ModelConfig(name=name, source=None, version=version).changed(settings)
        self._state.add(name, config, LoadedVersion(config, version, runner, self._clock))

    async def drain(self, seconds: float | None = None) -> None:
        """Refuse new requests, wait for those in service, by default `drain_seconds`, and close all models."""
        self._state.drain()
        await to_the_end(partial(self._retire_all, seconds))

    async def _retire_all(self, seconds: float | None) -> None:
        async with self._changing:
            await self._retire(self._state.retire_all(), seconds)

    async def abandon(self) -> None:
        """End what a drain, an unload or a load is still waiting for, now or later, with status 503."""
        for version in self._state.abandon():
            await version.runner.drain_async(timeout=0)

    async def _load(self, config: ModelConfig) -> LoadedVersion:
        version, source = _newest(config)
        if self.config.telemetry:
            config = replace(config, options=replace(config.options, telemetry=True))
        if config.options.run_times is None:
            config = replace(config, options=replace(config.options, run_times=RunTimes()))
        runner = await self._load_runner(config, source)
        try:
            return LoadedVersion(config, version, runner, self._clock)
        except BaseException:
            await to_the_end(partial(runner.drain_async, timeout=0))
            raise

    async def _retire(self, versions: list[LoadedVersion], seconds: float | None = None) -> None:
        longest = self.config.drain_seconds if seconds is None else seconds
        if self._state.abandoned:
            longest = 0.0

        async def retire(version: LoadedVersion) -> None:
            await version.retire(longest)
            self._state.closed(version)

        async with anyio.create_task_group() as tasks:
            for version in versions:
                tasks.start_soon(retire, version)

    @staticmethod
    def _retry_after(loaded: LoadedVersion) -> int:
        return max(1, min(math.ceil(loaded.last_seconds), _MAX_RETRY_SECONDS))


def _newest(config: ModelConfig) -> tuple[str, ModelSource]:
    """The version to load, and its source: of a folder with a folder for each version, that with the highest number."""
    source = config.source
    assert source is not None
    if not isinstance(source, str | PathLike):
        return config.version, source
    try:
        numbers = [one.name for one in Path(source).iterdir() if one.name.isdecimal() and one.is_dir()]
    except OSError:  # no folder
        return config.version, source
    if not numbers:
        return config.version, source
    version = max(numbers, key=int)
    folder = Path(source, version)
    files = sorted(folder.glob(f"*{PLAN_SUFFIX}")) or sorted(folder.glob("*.onnx"))
    if len(files) > 1:
        raise ModelFormatError(f"{folder}: expected one plan or one .onnx file, found {[file.name for file in files]}")
    return version, files[0] if files else folder


def _with_parameters(config: ModelConfig, parameters: Mapping[str, Parameter], limits: Limits) -> ModelConfig:
    """The configuration, with what a client asks for. Raises RequestError."""
    for key in parameters:
        if key != "config":
            raise RequestError(400, f"parameter {key!r:.80} is not supported: models come from the server's own files")
    text = parameters.get("config")
    if text is None:
        return config
    try:
        settings: Any = json.loads(text) if isinstance(text, str) else None
        if not isinstance(settings, dict):
            raise SettingError("config must be a JSON object")
        if not settings.keys().isdisjoint(_SERVERS_OWN):
            raise SettingError(f"{', '.join(_SERVERS_OWN)} are the server's to set")
        _check_within(settings, limits)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"model {config.name!r}: {error}") from error
    try:
        return config.changed(settings)
    except SettingError as error:  # which names the model
        raise RequestError(400, str(error)) from error


def _check_within(settings: Mapping[str, Any], limits: Limits) -> None:
    """Raise SettingError for settings that ask for more than a request may, or than the machine has."""
    for what in ("shapes", "warm_start"):
        shapes = settings.get(what)
        if isinstance(shapes, Mapping):
            if len(shapes) > limits.tensors:
                raise SettingError(f"{what} has {len(shapes)} inputs; at most {limits.tensors} are taken")
            for name, shape in shapes.items():
                problem = limits.problem_with_shape(shape)
                if problem is not None:
                    raise SettingError(f"{what} of {name!r:.80}: {problem}")
    cores = available_cores()
    most = {
        **dict.fromkeys(("replicas", "num_workers", "intra_op_threads", "streams_per_worker"), cores),
        "max_queued": limits.connections,
        "max_batch": limits.elements,
        "preparation_bytes": limits.body_bytes,
    }
    for what, bound in most.items():
        if isinstance(settings.get(what), int | float) and settings[what] > bound:
            raise SettingError(f"{what} is at most {bound}, not {settings[what]!r:.80}")


def _load_error(name: str, error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    why = str(error) if isinstance(error, DagexecError | OSError) else "internal error"
    return RequestError(500, f"model {name!r} could not be loaded: {why}")


def _timeout(parameters: Mapping[str, Parameter], longest: float | None) -> float | None:
    """Seconds that the request has."""
    microseconds = _whole(parameters, "timeout", _MAX_TIMEOUT_MICROSECONDS)
    if not microseconds:
        return longest
    seconds = microseconds / 1e6
    return seconds if longest is None else min(seconds, longest)


def _priority(parameters: Mapping[str, Parameter], config: ModelConfig) -> int:
    """The executor's priority of a request."""
    level = _whole(parameters, "priority", 1 << 31)
    return config.priority if level == 0 else config.priority + config.priority_level - level


def _whole(parameters: Mapping[str, Parameter], name: str, most: int) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:  # as Triton takes them
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise RequestError(400, f"parameter {name!r} must be a whole number from 0 to {most}, not {value!r:.80}")
    return value


_OUTCOMES: dict[int, Outcome] = {503: "rejected", 504: "timed_out"}


def _outcome(error: RequestError) -> Outcome:
    """Below 500 the mistake is the client's."""
    return "invalid" if error.status < 500 else _OUTCOMES.get(error.status, "failed")
