"""Policies by name: those that are bundled, and those that packages give the entry point group `dagexec.policies`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagexec.core.spelling import did_you_mean
from dagexec.errors import SettingError
from dagexec.platform.lazy import LazyModule
from dagexec.scheduling.critical_path import CriticalPath
from dagexec.scheduling.fifo import Fifo
from dagexec.scheduling.heft import Heft
from dagexec.scheduling.ios import Ios
from dagexec.scheduling.lifo import Lifo
from dagexec.scheduling.min_min import MinMin
from dagexec.scheduling.peft import Peft
from dagexec.scheduling.policy import Policy
from dagexec.scheduling.random_order import RandomOrder
from dagexec.scheduling.work_stealing import WorkStealing

if not TYPE_CHECKING:
    metadata = LazyModule("importlib.metadata")
else:
    from importlib import metadata

GROUP = "dagexec.policies"

_BUNDLED: dict[str, type[Policy]] = {
    found.name: found for found in (CriticalPath, Fifo, Lifo, Heft, Peft, MinMin, WorkStealing, RandomOrder, Ios)
}


def policy_names() -> tuple[str, ...]:
    """The names that `find_policy` knows."""
    return tuple(dict.fromkeys((*_BUNDLED, *metadata.entry_points(group=GROUP).names)))


def find_policy(given: object) -> Policy:
    """The policy of that name or class, or `given` itself. Raises SettingError for anything else."""
    found: object = given
    if isinstance(given, str):
        found = _BUNDLED.get(given) or _installed(given)
    if isinstance(found, type) and issubclass(found, Policy):
        try:
            found = found()
        except Exception as error:
            raise SettingError(f"policy {given!r:.80} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(found, Policy):
        raise SettingError(f"policy {given!r:.80}: expected a name or a dagexec.scheduling.Policy")
    if type(found).order is Policy.order and type(found).choose is Policy.choose:
        raise SettingError(f"policy {given!r:.80}: it has neither an `order` nor a `choose`")
    return found


def _installed(name: str) -> object:
    for entry_point in metadata.entry_points(group=GROUP, name=name):
        try:
            return entry_point.load()
        except Exception as error:
            what = f"policy {name!r} cannot be loaded from {entry_point.value}: {type(error).__name__}: {error}"
            raise SettingError(what) from error
    known = policy_names()
    raise SettingError(f"policy {name!r} is unknown; expected one of {', '.join(known)}{did_you_mean(name, known)}")
