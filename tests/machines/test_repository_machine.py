"""Every state of small worlds around the machine of a server's models, and the mistakes in it that these find."""

from __future__ import annotations

import pytest

from dagexec.server.repository_state import Entry, RepositoryState
from tests.machines.repository_world import Setting
from tests.machines.worlds import searched, with_other_futures
from tests.planted.bug import Edit, edited

SMALL = {
    "loads": Setting(loads=2, requests=2),
    "loads and unloads": Setting(loads=2, unloads=1, requests=1),
    "two models": Setting(models=2, loads=2, cancels=False),
    "the end": Setting(loads=2, requests=1, closes=True),
}

LARGE = {
    "more loads and unloads": Setting(loads=3, unloads=2, requests=2),
    "two models that are unloaded": Setting(models=2, loads=3, unloads=1, requests=1),
    "the end of loads and unloads": Setting(loads=3, unloads=1, requests=2, closes=True),
    "the end of two models": Setting(models=2, loads=2, unloads=1, requests=1, closes=True),
}
WORLDS = SMALL | LARGE


@pytest.mark.parametrize("name", SMALL)
def test_nothing_goes_wrong_in_a_small_world(name: str) -> None:
    found = searched(SMALL[name].world)
    assert (found.fault, found.path) == (None, ())
    assert found.exhausted


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_nothing_goes_wrong_in_a_larger_world(name: str) -> None:
    found = searched(LARGE[name].world, seconds=10)
    assert (found.fault, found.path) == (None, ())


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_what_has_one_state_has_one_future(name: str) -> None:
    assert with_other_futures(LARGE[name].world, 150) == []


MISTAKES = {
    "nobody closes what was served before": (
        "loads", "nobody closes a version that does not serve",
        Edit(RepositoryState.has_loaded, "        return old\n", "        return []\n"),
    ),
    "an unload does not wait for what an earlier load retires": (
        "loads and unloads", "unload ends before all is closed",
        Edit(RepositoryState.unloading, "        entry.retire()\n        return list(entry.retiring)\n",
            "        old = list(entry.versions.values())\n        entry.retire()\n        return old\n",
        ),
    ),
    "the end does not wait for what an earlier load retires": (
        "the end", "drain ends before all is closed",
        Edit(RepositoryState.retire_all, "        return self._retiring()", "        return []"),
    ),
    "a model is loaded after the end": (
        "the end", "something serves after the end",
        Edit(RepositoryState.loading, "        self._refuse_while_draining()\n", ""),
    ),
    "a request is taken after the end": (
        "the end", "a request is taken at the end",
        Edit(RepositoryState.find, "        self._refuse_while_draining()\n", ""),
    ),
    "a model that is unloaded serves on": (
        "loads and unloads", "a version serves that is closed",
        Edit(Entry.retire, "        self.versions, self.current = {}, None\n", ""),
    ),
    "a load that fails leaves nothing in service": (
        "loads", "nobody closes a version that does not serve",
        Edit(RepositoryState.not_loaded, "entry.reason = reason", "entry.versions, entry.current = {}, None"),
    ),
    "what could not be loaded is being loaded for ever": (
        "loads", "a model is being loaded, and nobody does that",
        Edit(RepositoryState.not_loaded, 'entry.state = "READY" if', 'entry.state = "LOADING" if'),
    ),
    "what is closed is not forgotten": (
        "loads", "what is closed counts as if it were not",
        Edit(RepositoryState.closed, "retiring.pop(version, None)", "retiring"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_machine_is_found(name: str) -> None:
    world, fault, mistake = MISTAKES[name]
    with edited((mistake,)):
        found = searched(SMALL[world].world)
    assert found.fault is not None
    assert fault in found.fault
