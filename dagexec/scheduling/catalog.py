"""Policies by name: those that are bundled, and those that packages give the entry point group `dagexec.policies`."""

from __future__ import annotations

from dagexec.core.spelling import did_you_mean
from dagexec.errors import SettingError
from dagexec.platform.plugins import PluginGroup, taken
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

_BUNDLED: dict[str, type[Policy]] = {
    found.name: found for found in (CriticalPath, Fifo, Lifo, Heft, Peft, MinMin, WorkStealing, RandomOrder, Ios)
}


def _policy_of_plugin(name: str, found: object) -> object:
    if name in _BUNDLED:
        raise taken(name, "a policy")
    if not isinstance(found, Policy) and not (isinstance(found, type) and issubclass(found, Policy)):
        raise SettingError(f"expected a dagexec.scheduling.Policy or its class, found {found!r:.200}")
    return found


PLUGINS = PluginGroup("policies", _policy_of_plugin)


def policy_names() -> tuple[str, ...]:
    """The names that `find_policy` knows."""
    return tuple(dict.fromkeys((*_BUNDLED, *PLUGINS.names())))


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
    found = PLUGINS.find(name)
    if found is None:
        known = policy_names()
        hint = PLUGINS.problem(name) or did_you_mean(name, known)
        raise SettingError(f"policy {name!r} is unknown; expected one of {', '.join(known)}{hint}")
    return found
