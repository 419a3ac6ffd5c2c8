"""Faults that a simulated device is told to have: the n-th launch, kernel, copy, event or allocation of a kind fails.

Which one fails is decided on the host in the order things are requested, whenever they run; so one host thread meets
the same fault at the same place under every driver. Host threads beside each other share the count.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType

from dagexec.errors import DeviceError
from dagexec.platform.forking import ProcessLock
from dagexec.platform.records import dataclass

KINDS = ("launch", "kernel", "copy", "event", "allocation", "hang")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: `launch`: the host call raises; `kernel`, `copy`: it raises on the stream, a blocking copy in the host
            call; `event`: recording raises in the host call; `allocation`: ResourceError; `hang`: a kernel or copy
            does not end before its stream is abandoned.
        match: part of the label of the kernel, copy or event owner, or a predicate on it; "" is any. An allocation's
            label is its number of bytes.
        nth: which of those that match, counted from 1.
        times: how many in a row from there.
        error: raised instead of a DeviceError, or ResourceError, that names what failed.
    """

    kind: str
    match: str | Callable[[str], bool] = ""
    nth: int = 1
    times: int = 1
    error: BaseException | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DeviceError(f"fault kind {self.kind!r} is unknown; expected one of {', '.join(KINDS)}")
        if self.nth < 1 or self.times < 1:
            raise DeviceError(f"a fault is counted from 1: found nth={self.nth}, times={self.times}")

    def matches(self, label: str) -> bool:
        """True for what the fault is about."""
        return self.match in label if isinstance(self.match, str) else self.match(label)


@dataclass(frozen=True)
class RandomFaults:
    """Faults by chance. `rates` gives the probability of each kind, at each thing that could have it."""

    seed: int
    rates: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for kind, rate in self.rates.items():
            if kind not in KINDS or not 0 <= rate <= 1:
                raise DeviceError(f"random faults: {kind!r} with rate {rate}; expected {', '.join(KINDS)} and 0 to 1")


class FaultPlan:
    """The faults of one device, and how many of what they match have been seen."""

    def __init__(self, faults: Sequence[Fault | RandomFaults]) -> None:
        self._lock = ProcessLock()
        self._single = [fault for fault in faults if isinstance(fault, Fault)]
        self._seen = [0] * len(self._single)
        self._chances = [(random.Random(f.seed), f.rates) for f in faults if isinstance(f, RandomFaults)]
        self._met: dict[str, int] = {}

    @property
    def met(self) -> dict[str, int]:
        """How many faults of each kind there were so far."""
        with self._lock.own:
            return dict(self._met)

    def find(self, kind: str, label: str) -> Fault | None:
        """The fault of `kind` that what is called `label` has. Counts."""
        with self._lock.own:
            found = None
            for index, fault in enumerate(self._single):
                if fault.kind == kind and fault.matches(label):
                    self._seen[index] += 1
                    if fault.nth <= self._seen[index] < fault.nth + fault.times:
                        found = found or fault
            for chance, rates in self._chances:
                if kind in rates and chance.random() < rates[kind]:
                    found = found or Fault(kind)
            if found is not None:
                self._met[kind] = self._met.get(kind, 0) + 1
            return found


def fault_error(fault: Fault, what: str) -> BaseException:
    """What `fault` raises where `what` fails."""
    return fault.error if fault.error is not None else DeviceError(f"{what} failed: a fault of kind {fault.kind!r}")
