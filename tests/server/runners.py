"""Things to serve that a test controls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import anyio
import numpy as np

from dagexec.core import dtypes
from dagexec.core.feeds import Array, Feeds
from dagexec.core.model import InputInfo
from dagexec.errors import ClosedError
from dagexec.executor.source.loading import ModelSource
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.repository import Repository


class HeldRunner:
    """y = x + number, once `go_on` is set; requests count themselves in."""

    def __init__(self, number: float, *, held: bool = False) -> None:
        self.number = number
        self.inside = 0
        self.cancelled = 0
        self.closed = False
        self.calls: list[tuple[float | None, int]] = []
        self.error: Exception | None = None
        self.entered = anyio.Event()
        self.go_on = anyio.Event()
        self._stop = anyio.Event()
        if not held:
            self.go_on.set()

    @property
    def inputs(self) -> Mapping[str, InputInfo]:
        return {"x": InputInfo(dtypes.FLOAT32, (None, 3))}

    @property
    def outputs(self) -> Sequence[str]:
        return ("y",)

    def output_info(self) -> Mapping[str, InputInfo]:
        return {"y": InputInfo(dtypes.FLOAT32, (None, 3))}

    async def run_async(
        self, feeds: Feeds, *, outputs: Iterable[str] | None = None, timeout: float | None = None, priority: int = 0
    ) -> dict[str, Array]:
        if self.closed:
            raise ClosedError("closed")
        self.calls.append((timeout, priority))
        if self.error is not None:
            raise self.error
        self.inside += 1
        self.entered.set()
        try:
            await self.go_on.wait()
        except BaseException:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1
        if self._stop.is_set():
            raise ClosedError("closed")
        return {"y": np.asarray(feeds["x"]) + np.float32(self.number)}

    async def drain_async(self, timeout: float | None = None) -> bool:
        self.closed = True
        if self.inside:
            self._stop.set()
            self.go_on.set()
            return False
        return True


class Loads:
    """Makes runners one after another: numbers 1, 2, 3..., or raises the errors that are put in their place."""

    def __init__(self, *prepared: HeldRunner | Exception) -> None:
        self.prepared = list(prepared)
        self.made: list[HeldRunner] = []
        self.sources: list[ModelSource] = []
        self.configs: list[ModelConfig] = []

    async def __call__(self, config: ModelConfig, source: ModelSource) -> HeldRunner:
        self.sources.append(source)
        self.configs.append(config)
        one = self.prepared.pop(0) if self.prepared else HeldRunner(len(self.made) + 1)
        if isinstance(one, Exception):
            raise one
        self.made.append(one)
        return one


def repository_of(loads: Loads, **models: ModelConfig) -> Repository:
    named = models or {"m": ModelConfig(name="m", source="m.onnx")}
    return Repository(ServerConfig(models=named, control=True, control_settings=True), load_runner=loads)


class AddingRunner(HeldRunner):
    """Sessions in which y is the sum of all x so far, held as other runs are; `sessions` are all that were opened."""

    def __init__(self, *, held: bool = False) -> None:
        super().__init__(0, held=held)
        self.sessions: list[AddingSession] = []

    @property
    def inputs(self) -> Mapping[str, InputInfo]:
        return {**super().inputs, "total": InputInfo(dtypes.FLOAT32, (1, 3))}

    @property
    def outputs(self) -> Sequence[str]:
        return ("y", "totalN")

    def session(self, states: Mapping[str, str] | None = None) -> AddingSession:
        self.sessions.append(AddingSession(self))
        return self.sessions[-1]

    @property
    def open(self) -> int:
        """Sessions that have not been closed."""
        return sum(not session.closed for session in self.sessions)


class AddingSession:
    """One of an `AddingRunner`; what it has run is in `seen`."""

    def __init__(self, runner: AddingRunner) -> None:
        self._runner = runner
        self._total = np.zeros((1, 3), np.float32)
        self._busy = False
        self.closed = False
        self.seen: list[float] = []

    @property
    def nbytes(self) -> int:
        return self._total.nbytes

    async def run_async(
        self, feeds: Feeds, *, outputs: Iterable[str] | None = None, timeout: float | None = None, priority: int = 0
    ) -> dict[str, Array]:
        assert not self.closed
        assert not self._busy
        self._busy = True
        try:
            total = self._total + (await self._runner.run_async(feeds, timeout=timeout, priority=priority))["y"]
        finally:
            self._busy = False
        self._total = total
        self.seen.append(float(np.asarray(feeds["x"])[0, 0]))
        return {"y": total}

    def close(self) -> None:
        assert not self._busy
        self.closed = True

    def __enter__(self) -> AddingSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
