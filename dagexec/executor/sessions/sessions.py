"""What the sessions of an executor have in common: the nets of their steps, and the memory of their caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dagexec.core.model import Model
from dagexec.executor.model_runner import ModelRunner
from dagexec.executor.sessions.branched import BranchedSession
from dagexec.executor.sessions.fed import FedSteps
from dagexec.executor.sessions.memory import SessionMemory
from dagexec.executor.sessions.names import caches_by_name
from dagexec.executor.sessions.session import Session
from dagexec.executor.sessions.steps import StepNets
from dagexec.executor.source.types import GivenTypes
from dagexec.options import CompileOptions


class Sessions:
    """Of one executor.

    Attributes:
        fed: runs that are fed caches; None for a model that has none, or whose requests are joined.
    """

    def __init__(
        self,
        executor: ModelRunner,
        model: Model,
        types: GivenTypes,
        options: CompileOptions,
        build: Callable[[Model, bool], ModelRunner],
        retire: Callable[[ModelRunner], object],
    ) -> None:
        """`model` is the executor's without weights in memory, `types` are the source model's.

        `build` and `retire` are for executors beside it, of steps (`StepNets`).
        """
        self._executor, self._types = executor, types
        joins = options.max_batch > 1
        self._nets = StepNets(model, build, retire, joins=joins)
        self._memory = SessionMemory(model.name, options.session_bytes)
        pairs = {} if joins else caches_by_name(executor.inputs, executor.outputs)
        self.fed = FedSteps(executor, pairs, types, self._nets) if pairs else None

    def new(self, states: Mapping[str, str] | None) -> Session:
        """See `Executor.session`."""
        return Session(self._executor, self._types, self._nets, self._memory, states)

    def begun_by(
        self, first: ModelRunner, condition: str, states: Mapping[str, str], results: Mapping[str, str]
    ) -> BranchedSession:
        """One whose first runs are those of `first`: see `BranchedSession`."""
        return BranchedSession(
            self._executor, self._types, self._nets, self._memory, states,
            first=first, condition=condition, results=results,
        )  # fmt: skip
