"""ArenaBudget: a number of bytes for the arenas of many nets; nets that are idle longest give theirs back.

An arena holds nothing between two runs, so its pages may go back to the system: the addresses stay, and the next run
gets new pages. Simultaneous runs may exceed the budget together; only a run that needs more by itself is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dagexec.errors import ResourceError
from dagexec.platform.forking import ProcessLock
from dagexec.platform.records import dataclass


class ArenaHolder(Protocol):
    """The owner of arenas, which knows which of them are in use."""

    @property
    def last_begun(self) -> float:
        """When its latest run began, by the clock of all holders."""
        ...

    def give_back_arenas(self) -> int:
        """Give back the arenas that no run uses, keeping runs from beginning meanwhile. Returns the number of bytes."""
        ...


@dataclass(frozen=True)
class ArenaStatistics:
    """The arenas of a pool's models at this moment.

    Attributes:
        used_bytes: in use.
        budget_bytes: allowed in total.
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
        """`refusal` words, from both numbers, why a run that needs more is refused; without it the run gets more."""
        self.nbytes = nbytes
        self._refusal = refusal
        self._lock = ProcessLock()
        self._used = 0
        self._given_back = 0
        self._accounts: dict[ArenaAccount, None] = {}  # those with bytes, in order: holders may be idle equally long

    def charge(self, account: ArenaAccount, nbytes: int) -> None:
        """A net uses `nbytes` for its arenas from now on, for a run that has begun. Raises ResourceError."""
        if nbytes > self.nbytes and self._refusal is not None:
            raise ResourceError(self._refusal(nbytes, self.nbytes))
        self._set(account, nbytes)
        over = self._used - self.nbytes
        if over <= 0:
            return
        with self._lock.own:
            holders = list(dict.fromkeys(entry.holder for entry in self._accounts))
        for holder in sorted(holders, key=lambda entry: entry.last_begun):
            freed = holder.give_back_arenas()
            self._given_back += freed > 0
            over -= freed
            if over <= 0:
                return

    def discharge(self, account: ArenaAccount, nbytes: int = 0) -> None:
        """A net uses at most `nbytes` from now on."""
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
        holder: knows whether the net is in a run.
        nbytes: what they take. Set by the budget.
    """

    budget: ArenaBudget
    holder: ArenaHolder
    nbytes: int = 0
