"""A small world around a budget of bytes for arenas: models whose runs begin and end, each with a need of its own."""

from __future__ import annotations

import copyreg
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from dagexec.errors import ResourceError
from dagexec.platform.forking import ProcessLock
from dagexec.scheduler.exploration.state_search import ModelFault
from dagexec.scheduler.memory.arena_budget import ArenaAccount, ArenaBudget
from tests.machines.worlds import Event

copyreg.pickle(ProcessLock, lambda _: (ProcessLock, ()))


@dataclass(eq=False)
class _Model:
    """A model that has one arena."""

    number: int
    needs: tuple[int, ...]
    last_begun: float = 0.0
    is_running: bool = False
    account: ArenaAccount = field(init=False)

    def give_back_arenas(self) -> int:
        if self.is_running or not self.account.nbytes:
            return 0
        found = self.account.nbytes
        self.account.budget.discharge(self.account)
        return found


@dataclass(frozen=True)
class Setting:
    """The bytes that the runs of each model may need, and those that there are; with `refuses` no run has more."""

    needs: tuple[tuple[int, ...], ...]
    nbytes: int
    refuses: bool = False

    def world(self) -> ArenaWorld:
        """At the beginning."""
        return ArenaWorld(self)


class ArenaWorld:
    """What there is at one moment. Models are alike but for their needs."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.budget = ArenaBudget(setting.nbytes, "{} of {}".format if setting.refuses else None)
        self.models = [_Model(number, needs) for number, needs in enumerate(setting.needs)]
        for model in self.models:
            model.account = ArenaAccount(self.budget, model)
        self.clock = 0.0

    def events(self) -> Iterator[Event]:
        for model in self.models:
            if model.is_running:
                yield "end", model.number
            else:
                yield from (("begin", model.number, nbytes) for nbytes in model.needs)
                yield "close", model.number

    def do(self, event: Event) -> None:
        what, number, *rest = event
        model = self.models[number]  # type: ignore[call-overload]
        if what == "end":
            model.is_running = False
        elif what == "close":
            self.budget.discharge(model.account)
        else:
            self._begin(model, rest[0])  # type: ignore[arg-type]

    def _begin(self, model: _Model, nbytes: int) -> None:
        self.clock += 1
        model.is_running, model.last_begun = True, self.clock
        before = {other: other.account.nbytes for other in self.models}
        try:
            self.budget.charge(model.account, nbytes)
        except ResourceError:
            model.is_running = False
            self._expect(self.setting.refuses and nbytes > self.setting.nbytes, "a run is refused that fits")
            return
        self._expect(not self.setting.refuses or nbytes <= self.setting.nbytes, "a run has more than there is")
        idle = [other for other in self.models if not other.is_running]
        gave = [other for other in idle if before[other] > other.account.nbytes]
        kept = [other for other in idle if other.account.nbytes]
        if sum(other.account.nbytes for other in self.models) > self.setting.nbytes:
            self._expect(not kept, "an idle model keeps bytes that a run needs")
        self._expect(
            not (gave and kept) or max(one.last_begun for one in gave) < min(one.last_begun for one in kept),
            "a model gives back before one that has been idle for longer",
        )
        if gave:
            last = max(gave, key=lambda one: one.last_begun)
            without = sum(other.account.nbytes for other in self.models) + before[last]
            self._expect(without > self.setting.nbytes, "a model gives back although there is room")

    @staticmethod
    def _expect(holds: bool, text: str) -> None:
        if not holds:
            raise ModelFault(text)

    def fault(self) -> str | None:
        if self.budget.statistics().used_bytes != sum(model.account.nbytes for model in self.models):
            return "the budget counts other bytes than its models have"
        return None

    def is_over(self) -> bool:
        return True

    def key(self) -> Hashable:
        order = sorted(self.models, key=lambda model: model.last_begun)
        return tuple((model.number, model.is_running, model.account.nbytes) for model in order)
