"""ArenaBudget: a number of bytes for the arenas of many nets. Those that are idle longest give theirs back.

An arena holds nothing between two runs, so its pages may go back to the system: the addresses stay, and the next run
gets new pages. Runs at one time may need more than the budget together; only one that needs more alone is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dagexec.errors import ResourceError
from dagexec.platform.forking import ProcessLock
from dagexec.platform.records import dataclass


class ArenaHolder(Protocol):
    """Who has arenas, and knows which of them are in use."""

    @property
    def last_begun(self) -> float:
        """When its latest run began, by the clock of all holders."""
        ...

    def give_back_arenas(self) -> int:
        """Give back the arenas that no run uses, and keep runs from beginning meanwhile. How many bytes that were."""
        ...


@dataclass(frozen=True)
class ArenaStatistics:
    """The arenas of a pool's models at this moment.

    Attributes:
        used_bytes: what they have taken.
        budget_bytes: what they may keep.
        given_back: how often a model has given back its arenas for another's.
    """

    used_bytes: int
    budget_bytes: int
    given_back: int


class ArenaBudget:
    """Bytes for arenas on the host.

    Attributes:
        nbytes: how many.
    """

    def __init__(self, nbytes: int, refusal: Callable[[int, int], str] | None = None) -> None:
        """`refusal` says, with both numbers put in, that one run needs more; without it such a run has more."""
        self.nbytes = nbytes
        self._refusal = refusal
        self._lock = ProcessLock()
        self._used = 0
        self._given_back = 0
        self._accounts: dict[ArenaAccount, None] = {}  # those with bytes; in order, as holders may be idle equally long

    def charge(self, account: ArenaAccount, nbytes: int) -> None:
        """A net uses `nbytes` for its arenas from now on, for a run that has begun. Raises ResourceError."""
        if nbytes > self.nbytes and self._refusal is not None:
            raise ResourceError(self._refusal(nbytes, self.nbytes))
        self._set(account, nbytes)
        over = self._used - self.nbytes
        if over <= 0:
            return
        with self._lock.own:
            holders = list(dict.fromkeys(one.holder for one in self._accounts))
        for holder in sorted(holders, key=lambda one: one.last_begun):
            freed = holder.give_back_arenas()
            self._given_back += freed > 0
            over -= freed
            if over <= 0:
                return

    def discharge(self, account: ArenaAccount, nbytes: int = 0) -> None:
        """A net uses no more than `nbytes` any more."""
        self._set(account, nbytes)

    def statistics(self) -> ArenaStatistics:
        """Bytes at this moment."""
        return ArenaStatistics(self._used, self.nbytes, self._given_back)

    def _set(self, account: ArenaAccount, nbytes: int) -> None:
        with self._lock.own:
            self._used += nbytes - account.nbytes
            account.nbytes = nbytes
            if nbytes:
                self._accounts[account] = None
            else:
                self._accounts.pop(account, None)


@dataclass(eq=False, slots=True)
class ArenaAccount:
    """What the arenas of one net take of a budget.

    Attributes:
        holder: who knows whether the net is in a run.
        nbytes: how many bytes they take. The budget's.
    """

    budget: ArenaBudget
    holder: ArenaHolder
    nbytes: int = 0
