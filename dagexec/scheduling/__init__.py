"""Policies: which chain of a net runs next, and on which worker (docs/scheduling.md).

A `Policy` is used unchanged by predictions, explored schedules and runs. `find_policy` knows those that are bundled,
each in a module that names its paper, and those of the entry point group `dagexec.policies`.
"""

from typing import TYPE_CHECKING

from dagexec.platform.lazy import lazy_names
from dagexec.scheduling.policy import Chains, Policy, RunState

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "dagexec.scheduling.catalog": ("find_policy", "policy_names"),
            "dagexec.scheduling.critical_path": ("CriticalPath",),
            "dagexec.scheduling.fifo": ("Fifo",),
            "dagexec.scheduling.heft": ("Heft",),
            "dagexec.scheduling.ios": ("Ios",),
            "dagexec.scheduling.lifo": ("Lifo",),
            "dagexec.scheduling.min_min": ("MinMin",),
            "dagexec.scheduling.peft": ("Peft",),
            "dagexec.scheduling.random_order": ("RandomOrder",),
            "dagexec.scheduling.work_stealing": ("WorkStealing",),
        },
    )
else:
    from dagexec.scheduling.catalog import find_policy, policy_names
    from dagexec.scheduling.critical_path import CriticalPath
    from dagexec.scheduling.fifo import Fifo
    from dagexec.scheduling.heft import Heft
    from dagexec.scheduling.ios import Ios
    from dagexec.scheduling.lifo import Lifo
    from dagexec.scheduling.min_min import MinMin
    from dagexec.scheduling.peft import Peft
    from dagexec.scheduling.random_order import RandomOrder
    from dagexec.scheduling.work_stealing import WorkStealing

__all__ = [
    "Chains",
    "CriticalPath",
    "Fifo",
    "Heft",
    "Ios",
    "Lifo",
    "MinMin",
    "Peft",
    "Policy",
    "RandomOrder",
    "RunState",
    "WorkStealing",
    "find_policy",
    "policy_names",
]
