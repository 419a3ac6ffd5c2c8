"""The nets of steps that an executor's sessions have in common, by sizes; each is made when a session first asks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from dagexec.compiler.growing_axes import NotSteppingError
from dagexec.compiler.joined_steps import joined_step
from dagexec.compiler.stepping import Stepping, stepping_net
from dagexec.core.model import Model
from dagexec.core.schema import TensorType
from dagexec.errors import DagexecError, RowsError, SettingError
from dagexec.executor.model_runner import ModelRunner
from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads

_Value = TypeVar("_Value")

logger = logging.getLogger("dagexec")

_MOST = 16
"""Nets that are kept while nobody uses them: for as many sizes of inputs and of caches, which double."""

_MOST_REFUSED = 1 << 10
"""Sizes without a net that are remembered."""


@dataclass(frozen=True)
class StepNet:
    """A net of a step, and the executor that runs it."""

    net: Stepping
    executor: ModelRunner


class StepNets:
    """Of one executor."""

    def __init__(
        self,
        model: Model,
        build: Callable[[Model, bool], ModelRunner],
        retire: Callable[[ModelRunner], object],
        *,
        joins: bool,
    ) -> None:
        """`build` makes an executor on the workers of this one, with its parameters; `retire` closes it.

        `build` is told whether it is to join requests, which is so where this `joins` and the net is for rows.
        """
        self._model, self._build, self._retire, self._joins = model, build, retire, joins
        self._nets: dict[Hashable, StepNet] = {}
        self._refused: dict[Hashable, None] = {}
        self._executors: list[tuple[weakref.ref[StepNet], ModelRunner]] = []
        self._lock = threads().lock()

    def find(
        self,
        states: Mapping[str, str],
        types: Mapping[str, TensorType],
        growing: Mapping[str, tuple[int, int]],
        length: int,
    ) -> StepNet | None:
        """See `stepping_net`; None where there is none. Who is given a net holds it as long as it runs."""
        key = tuple(sorted(states.items())), tuple(sorted((name, str(kind)) for name, kind in types.items())), length
        with self._lock:
            if key in self._refused:
                return None
            net = self._nets.pop(key, None)
            if net is None:
                try:
                    stepping = stepping_net(self._model, states, types, growing, length)
                    net = StepNet(stepping, self._executor(stepping, types))
                except (NotSteppingError, DagexecError) as reason:
                    logger.info("net %r: caches are copied at every step: %s", self._model.name, str(reason))
                    _keep(self._refused, key, None, _MOST_REFUSED)
                    return None
                self._executors.append((weakref.ref(net), net.executor))
            _keep(self._nets, key, net, _MOST)
            self._retire_unused()
            return net

    def _executor(self, net: Stepping, types: Mapping[str, TensorType]) -> ModelRunner:
        """That of the same net for inputs of other sizes, for which it is prepared anew; or a new one."""
        alike = (one.executor for one in self._nets.values() if not self._joins and one.net.computes_as(net))
        return next(alike, None) or self._built(net, types)

    def _built(self, net: Stepping, types: Mapping[str, TensorType]) -> ModelRunner:
        if self._joins:
            try:
                return self._build(joined_step(net, types), True)
            except (NotSteppingError, RowsError, SettingError) as reason:
                logger.info("net %r: steps of sessions are not joined: %s", self._model.name, str(reason))
        return self._build(net.model, False)

    def _retire_unused(self) -> None:
        used = [(reference, executor) for reference, executor in self._executors if reference() is not None]
        kept = {id(executor) for _, executor in used}
        unused = {id(executor): executor for _, executor in self._executors if id(executor) not in kept}
        self._executors = used
        for executor in unused.values():
            self._retire(executor)


def _keep(table: dict[Hashable, _Value], key: Hashable, value: _Value, limit: int) -> None:
    """Put an entry last, and let go of the first where there are more."""
    table[key] = value
    if len(table) > limit:
        del table[next(iter(table))]
