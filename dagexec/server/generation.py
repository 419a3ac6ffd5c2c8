"""Tokens that a model generates: what one run of a session gives is what the next one is fed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import anyio
import numpy as np

from dagexec.core.feeds import Array
from dagexec.core.model import InputInfo
from dagexec.core.spelling import did_you_mean
from dagexec.errors import SettingError
from dagexec.executor.sessions.session import Session
from dagexec.platform.records import dataclass
from dagexec.server.config import GenerationConfig
from dagexec.server.inference import FinishReason, RequestError


@dataclass(frozen=True)
class Generator:
    """Generates with one version of a model.

    Attributes:
        config: how.
        inputs: those of the model.
        open_session: begins a text.
    """

    config: GenerationConfig
    inputs: Mapping[str, InputInfo]
    open_session: Callable[[], Session]

    def check(self, outputs: Sequence[str]) -> None:
        """Raise SettingError for names that the model, which has these outputs, does not have."""
        named = (
            (self.config.input, self.inputs),
            (self.config.mask, self.inputs),
            (self.config.positions, self.inputs),
        )
        for name, among in (*named, (self.config.output, outputs)):
            if name is not None and name not in among:
                raise SettingError(f"generation: the model has no {name!r}{did_you_mean(name, among)}")

    async def tokens(
        self, feeds: Mapping[str, Array], count: int, *, timeout: float | None, priority: int
    ) -> AsyncGenerator[tuple[int, FinishReason], None]:
        """Up to so many tokens, and why each was the last one, or "".

        `feeds` are the prompt and what else each run is fed. The other arguments are those of `Session.run_async`, with
        a `timeout` for all of it. Raises RequestError (400) for a prompt that is none, and what a run raises.
        """
        config = self.config
        until = None if timeout is None else anyio.current_time() + timeout
        fresh = _prompt(config.input, feeds)
        others = {name: array for name, array in feeds.items() if name != config.input}
        at_once = 1 if (self.inputs[config.input].shape or (None,))[-1] == 1 else fresh.size
        length = 0
        with self.open_session() as session:
            for number in range(1, count + 1):
                for start in range(0, fresh.size, at_once):
                    part = fresh[start : start + at_once]
                    length += part.size
                    left = None if until is None else max(0.0, until - anyio.current_time())
                    results = await session.run_async(
                        others | self._fed(part, length), outputs=[config.output], timeout=left, priority=priority
                    )
                token = _chosen(results[config.output])
                reason: FinishReason = "stop" if token in config.stop else "length" if number == count else ""
                yield token, reason
                if reason:
                    return
                fresh = np.array([token], fresh.dtype)

    def _fed(self, part: Array, length: int) -> dict[str, Array]:
        """What a run is fed that adds these tokens, with which there are `length`."""
        fed = {self.config.input: part}
        if self.config.mask is not None:
            fed[self.config.mask] = np.ones(length, self._dtype(self.config.mask))
        if self.config.positions is not None:
            fed[self.config.positions] = np.arange(length - part.size, length, dtype=self._dtype(self.config.positions))
        return {name: self._as_batch(name, row) for name, row in fed.items()}

    def _dtype(self, name: str) -> np.dtype:
        dtype = self.inputs[name].dtype
        return np.dtype(np.int64) if dtype is None else dtype.numpy

    def _as_batch(self, name: str, row: Array) -> Array:
        """A row with as many axes as the input has."""
        shape = self.inputs[name].shape
        axes = 2 if shape is None else len(shape)
        return row.reshape((1,) * (axes - 1) + row.shape)


def _prompt(name: str, feeds: Mapping[str, Array]) -> Array:
    """Tokens in a row. Raises RequestError."""
    prompt = feeds.get(name)
    if prompt is None or prompt.ndim == 0 or not prompt.size or prompt.size != prompt.shape[-1]:
        shape = "nothing" if prompt is None else f"shape {list(prompt.shape)}"
        raise RequestError(400, f"generation needs the tokens of one text in input {name!r:.80}, not {shape}")
    return prompt.reshape(-1)


def _chosen(output: Array) -> int:
    """The next token."""
    if output.dtype.kind in "iu":
        return int(output.reshape(-1)[-1])
    return int(output.reshape(-1, output.shape[-1])[-1].argmax())
