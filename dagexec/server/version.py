"""One loaded version of a model: what runs it, what is known of it, and who still uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import anyio

from dagexec.core.feeds import Array, Feeds
from dagexec.core.model import InputInfo
from dagexec.errors import SettingError
from dagexec.executor.requests.waiting import to_the_end
from dagexec.executor.sessions.names import states_by_name
from dagexec.executor.sessions.session import Session
from dagexec.server.config import ModelConfig
from dagexec.server.datatypes import datatype_of
from dagexec.server.generation import Generator
from dagexec.server.inference import TensorMetadata
from dagexec.server.sequences import Sequences

PLATFORM = "dagexec"


class Runner(Protocol):
    """What can stand behind a name: an `Executor`, or a deployment on other machines."""

    @property
    def inputs(self) -> Mapping[str, InputInfo]:
        """Name, type and shape of each input."""
        ...

    @property
    def outputs(self) -> Sequence[str]:
        """Names of the results."""
        ...

    def output_info(self) -> Mapping[str, InputInfo]:
        """What is known of each result."""
        ...

    async def run_async(
        self, feeds: Feeds, *, outputs: Iterable[str] | None = None, timeout: float | None = None, priority: int = 0
    ) -> dict[str, Array]:
        """As `Executor.run_async`."""
        ...

    async def drain_async(self, timeout: float | None = None) -> bool:
        """As `Executor.drain_async`."""
        ...


class LoadedVersion:
    """A version that serves requests until it is retired.

    Attributes:
        config: what it was loaded with.
        version: what clients call it.
        runner: what runs it.
        names: its results.
        sequences: those of its requests.
        generator: generates with it; None if its configuration does not say how.
        running: requests in service.
        answered: how many requests ended in `success` or `fail`, and how many seconds they took together.
        last_milliseconds: when the latest request came, in milliseconds since 1970; 0 before the first.
        last_seconds: what the latest request took that was answered. It waited for all that were before it, so one
            that is refused now finds room after about as long.
    """

    def __init__(self, config: ModelConfig, version: str, runner: Runner, clock: Callable[[], float]) -> None:
        """`clock` tells how long sequences are idle.

        Raises SettingError for inputs and outputs that the protocol has no words for, and for settings of sequences and
        generation that do not fit the model; FeedError for states that it does not have.
        """
        self.config = config
        self.version = version
        self.runner = runner
        self.inputs = tuple(_metadata(name, info) for name, info in runner.inputs.items())
        results = runner.output_info()
        self.outputs = tuple(_metadata(name, info) for name, info in results.items())
        for name, info in results.items():
            if info.is_optional:
                raise _no_words(name, info)
        self.names = frozenset(runner.outputs)
        opens = _session_opener(config, runner)
        self.sequences = Sequences(config.name, config.sequences, opens, clock)
        self.generator: Generator | None = None
        if config.generation is not None:
            if opens is None:
                raise SettingError("generation needs states or caches, which sequences.states names")
            self.generator = Generator(config.generation, runner.inputs, opens)
            self.generator.check(runner.outputs)
        self.running = 0
        self.answered = {"success": (0, 0.0), "fail": (0, 0.0)}
        self.last_milliseconds = 0
        self.last_seconds = 0.0
        self._idle = anyio.Event()
        self._retired = False

    def enter(self) -> None:
        """A request begins."""
        self.running += 1

    def leave(self, completed: bool, seconds: float) -> None:
        """A request is over, so long after it came."""
        self.count(completed, seconds)
        if completed:
            self.last_seconds = seconds
        self.running -= 1
        if self._retired and not self.running:
            self._idle.set()

    def count(self, completed: bool, seconds: float) -> None:
        """A request is over, or was refused before it began."""
        how = "success" if completed else "fail"
        count, total = self.answered[how]
        self.answered[how] = count + 1, total + seconds
        self.last_milliseconds = round(1000 * (time.time() - seconds))

    async def retire(self, seconds: float) -> None:
        """Wait up to so many seconds for its requests, which get no more company, then close it.

        What is not finished by then ends with ClosedError. The close is not interrupted by a cancellation.
        """
        self._retired = True
        self.sequences.close()
        await to_the_end(partial(self._close, seconds))

    async def _close(self, seconds: float) -> None:
        if self.running:
            with anyio.move_on_after(seconds):
                await self._idle.wait()
        await self.runner.drain_async(timeout=0)


def _session_opener(config: ModelConfig, runner: Runner) -> Callable[[], Session] | None:
    """What begins a sequence of runs; None for a runner that keeps nothing between them."""
    session: Callable[[Mapping[str, str] | None], Session] | None = getattr(runner, "session", None)
    states = config.sequences.states
    if session is None:
        if states:
            raise SettingError("sequences.states: only an executor in the server's process keeps states between runs")
        return None
    if states is None:
        return partial(session, None) if states_by_name(runner.inputs, runner.outputs) else None
    session(states).close()
    return partial(session, states)


def _no_words(name: str, info: InputInfo) -> SettingError:
    return SettingError(f"{name!r} is {info}; the Open Inference Protocol has no such tensors")


def _metadata(name: str, info: InputInfo) -> TensorMetadata:
    datatype = datatype_of(info.dtype)
    if info.is_sequence or datatype is None:
        raise _no_words(name, info)
    shape = None if info.shape is None else tuple(-1 if size is None else size for size in info.shape)
    return TensorMetadata(name, datatype, shape)
