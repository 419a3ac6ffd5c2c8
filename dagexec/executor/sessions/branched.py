"""Sessions of a model whose first run takes a branch of its own, in which there are no states yet."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dagexec.binding.io_binding import Array, Outputs
from dagexec.core.feeds import Feeds, check_feeds, named_feeds
from dagexec.executor.model_runner import ModelRunner
from dagexec.executor.requests.call import Call
from dagexec.executor.sessions.memory import SessionMemory
from dagexec.executor.sessions.session import Session
from dagexec.executor.sessions.steps import StepNets
from dagexec.executor.source.types import GivenTypes


class BranchedSession(Session):
    """A session of the branch that has states; a run where the condition is false begins anew, by the other one."""

    def __init__(
        self,
        executor: ModelRunner,
        types: GivenTypes,
        nets: StepNets,
        memory: SessionMemory,
        states: Mapping[str, str],
        *,
        first: ModelRunner,
        condition: str,
        results: Mapping[str, str],
    ) -> None:
        """`first` runs the other branch, whose `results` are the first states, and what each run reads after it."""
        super().__init__(executor, types, nets, memory, states)
        self._first, self._condition, self._results = first, condition, dict(results)
        self._first_constants: dict[str, Array] = {}

    def reset(self, state: Mapping[str, npt.ArrayLike] | None = None) -> None:
        """As `Session.reset`, of inputs of both branches."""
        given, alone = state or {}, self._first.inputs.keys() - self.inputs.keys()
        constants = {name: np.array(given[name]) for name in alone & given.keys()}
        check_feeds(self._first.model, constants, frozenset())
        super().reset({name: array for name, array in given.items() if name not in constants})
        self._first_constants = constants

    def _another(self) -> BranchedSession:
        other = BranchedSession(
            self._executor, self._types, self._nets, self._memory, self._pairs,
            first=self._first, condition=self._condition, results=self._results,
        )  # fmt: skip
        other._first_constants = self._first_constants
        return other

    def _run(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        fed, is_first = self._branch(feeds)
        if not is_first:
            return super()._run(fed, call)
        with self._alone():
            names, asked = self._asked(call)
            return self._begun_by(self._first._run(self._of_first(fed), asked), names)

    async def _run_async(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        fed, is_first = self._branch(feeds)
        if not is_first:
            return await super()._run_async(fed, call)
        with self._alone():
            names, asked = self._asked(call)
            return self._begun_by(await self._first._run_async(self._of_first(fed), asked), names)

    def _branch(self, feeds: Feeds | npt.ArrayLike) -> tuple[dict[str, npt.ArrayLike], bool]:
        """What is fed but the condition, and whether that is false, as it is by default while there are no states."""
        others = frozenset[str]()
        if not isinstance(feeds, Mapping):
            others = others.union(self.inputs, self._first.inputs)
            others -= {*self._pairs, *self._constants, *self._first_constants}
        fed = dict(named_feeds(self.model.name, feeds, others))
        condition = fed.pop(self._condition, None)
        is_first = (
            not self._states.arrays and self.caches is None if condition is None else not np.asarray(condition).all()
        )
        return fed, is_first

    def _of_first(self, fed: Feeds) -> dict[str, npt.ArrayLike]:
        """What the first branch is fed: all but what only the other one reads."""
        return {
            name: array
            for name, array in {**self._constants, **self._first_constants, **fed}.items()
            if name in self._first.inputs or name not in self.inputs
        }

    def _asked(self, call: Call) -> tuple[list[str], Call]:
        """The outputs for the caller, and a call for these and the states."""
        states = set(self._results.values())
        names = [name for name in self.outputs if name not in states] if call.outputs is None else list(call.outputs)
        return names, call._replace(outputs=list(dict.fromkeys((*names, *self._results.values()))))

    def _begun_by(self, results: Outputs, names: list[str]) -> Outputs:
        """The caller's outputs of a first run; the others are where the next one begins."""
        began = {name: results[output] for name, output in self._results.items()}
        began = {name: array.copy() if self._results[name] in names else array for name, array in began.items()}
        self._begin({**self._constants, **began})
        return {name: results[name] for name in names}
