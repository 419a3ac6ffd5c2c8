"""The nets of steps that an executor's sessions have in common, by sizes; each is made when a session first asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping

from dagexec.compiler.stepping import NotSteppingError, Stepping, stepping_net
from dagexec.core.model import Model
from dagexec.core.schema import TensorType
from dagexec.errors import DagexecError
from dagexec.executor.model_runner import ModelRunner
from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads

logger = logging.getLogger("dagexec")

_MOST = 16
"""Nets of an executor: for as many sizes of inputs and of caches, which double."""


@dataclass(frozen=True)
class StepNet:
    """A net of a step, and the executor that runs it."""

    net: Stepping
    executor: ModelRunner


class StepNets:
    """Of one executor."""

    def __init__(self, model: Model, build: Callable[[Model], ModelRunner]) -> None:
        """`build` makes an executor on the workers of this one, with its parameters."""
        self._model, self._build = model, build
        self._nets: dict[Hashable, StepNet | None] = {}
        self._lock = threads().lock()

    def find(
        self,
        states: Mapping[str, str],
        types: Mapping[str, TensorType],
        growing: Mapping[str, tuple[int, int]],
        length: int,
    ) -> StepNet | None:
        """See `stepping_net`; None where there is none."""
        key = tuple(sorted(states.items())), tuple(sorted((name, str(kind)) for name, kind in types.items())), length
        with self._lock:
            if key not in self._nets and len(self._nets) < _MOST:
                self._nets[key] = self._made(states, types, growing, length)
            return self._nets.get(key)

    def _made(
        self,
        states: Mapping[str, str],
        types: Mapping[str, TensorType],
        growing: Mapping[str, tuple[int, int]],
        length: int,
    ) -> StepNet | None:
        try:
            net = stepping_net(self._model, states, types, growing, length)
            return StepNet(net, self._build(net.model))
        except (NotSteppingError, DagexecError) as reason:
            logger.info("net %r: caches of sessions are copied at every step: %s", self._model.name, reason)
            return None

    def close(self) -> None:
        """Close all executors."""
        with self._lock:
            nets, self._nets = self._nets, {}
        for one in nets.values():
            if one is not None:
                one.executor.close()
