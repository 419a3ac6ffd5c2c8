"""Is a net safe to run? A static proof over its plan, and a detector that watches a run; `docs/hazards.md` has both.

`check` proves, with `accesses` (what operators touch) and `happens_before` (what is surely ordered), that no two
conflicting accesses are unordered. `detector` finds the same at run time, from what streams and workers really did.
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
