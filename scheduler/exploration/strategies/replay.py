"""ReplayStrategy: the decisions of an earlier schedule."""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.errors import DagexecError
from dagexec.scheduler.exploration.strategies.strategy import Candidate, Strategy


class ReplayStrategy(Strategy):
    """The decisions of an earlier schedule again; beyond their end, no preemption."""

    name = "replay"

    def __init__(
        self, decisions: Sequence[int], choices: Sequence[int] | None = None, *, timeouts: bool = False
    ) -> None:
        """`choices`, how many candidates there were, makes sure that the scenario behaves as it did."""
        self.timeouts = timeouts
        self._decisions = tuple(decisions)
        self._choices = None if choices is None else tuple(choices)
        self._made = 0

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        """The next decision. Raises DagexecError when the scenario does not behave as it did then."""
        number, self._made = self._made, self._made + 1
        if number >= len(self._decisions):
            return 0
        decision = self._decisions[number]
        if decision >= len(candidates) or (self._choices is not None and self._choices[number] != len(candidates)):
            were = f"choice {decision}" if self._choices is None else f"choice {decision} of {self._choices[number]}"
            raise DagexecError(
                f"the schedule cannot be replayed: at decision {number} there are {len(candidates)} candidates, "
                f"but {were} was recorded; the scenario depends on something other than its schedule"
            )
        return decision
