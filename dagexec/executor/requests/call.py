"""Call: the arguments of a run besides its feeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dagexec.binding.io_binding import Array
from dagexec.scheduler.observe.observers import Observer


class Call(NamedTuple):
    """The arguments of `run` and `run_async` (`dagexec.executor.model_runner`), made there and passed on whole."""

    outputs: Iterable[str] | None = None
    out: Mapping[str, Array] | None = None
    timeout: float | None = None
    priority: int = 0
    trace: Observer | None = None


PLAIN = Call()
"""The call with feeds alone, shared because making a `Call` takes a noticeable part of a small net's run."""
