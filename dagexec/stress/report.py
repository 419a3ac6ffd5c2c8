"""The result of a session of stress cases: what was tried, how fast, and what was found."""

from __future__ import annotations

from collections.abc import Mapping

from dagexec.platform.records import dataclass
from dagexec.stress.case import Case


@dataclass(frozen=True)
class Defect:
    """The first case that went wrong: its seed, the command that runs it again, and what was found."""

    case: int
    description: str
    replay: str
    problem: str

    @staticmethod
    def of(case: Case, problem: str) -> Defect:
        """What `case` has shown."""
        return Defect(case.seed, case.describe(), case.replay(), problem)


@dataclass(frozen=True)
class StressReport:
    """The result of a session.

    Attributes:
        seed, device, net_type: what was requested; `net_type` is None for all of them.
        seconds: the duration.
        tried: how often each thing was tried, by name.
        defect: what was found; None for nothing.
    """

    seed: int
    device: str
    net_type: str | None
    seconds: float
    tried: Mapping[str, int]
    defect: Defect | None

    @property
    def cases(self) -> int:
        """Cases that were run to their end."""
        return self.tried.get("cases", 0)

    @property
    def runs(self) -> int:
        """Runs of a net in them, whatever their end."""
        return self.tried.get("runs", 0)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "seed": self.seed,
            "device": self.device,
            "net_type": self.net_type,
            "seconds": round(self.seconds, 3),
            "cases": self.cases,
            "cases_per_second": round(self.cases / self.seconds, 2) if self.seconds else 0.0,
            "runs": self.runs,
            "runs_per_second": round(self.runs / self.seconds, 2) if self.seconds else 0.0,
            "tried": dict(sorted(self.tried.items())),
            "defect": None if self.defect is None else vars(self.defect),
        }
