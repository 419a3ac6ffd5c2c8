"""Is a net safe to run? A static proof over its plan, and a detector that watches runs; see `docs/hazards.md`.

`check` proves, with `accesses` (what operators touch) and `happens_before` (what is ordered in every schedule), that no
two conflicting accesses are unordered. `detector` looks for them at run time, in what streams and workers really did.
"""

from dagexec.scheduler.hazards.accesses import Accesses, Resource, named_accesses, prepared_accesses
from dagexec.scheduler.hazards.check import (
    Proof,
    UnorderedAccesses,
    check_net,
    check_order,
    check_plan,
    conflicts,
)
from dagexec.scheduler.hazards.detector import Detector, Race, detecting
from dagexec.scheduler.hazards.happens_before import HappensBefore
from dagexec.scheduler.hazards.pieces import PieceFault

__all__ = [
    "Accesses",
    "Detector",
    "HappensBefore",
    "PieceFault",
    "Proof",
    "Race",
    "Resource",
    "UnorderedAccesses",
    "check_net",
    "check_order",
    "check_plan",
    "conflicts",
    "detecting",
    "named_accesses",
    "prepared_accesses",
]
