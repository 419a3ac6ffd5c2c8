"""Every state of small worlds around a budget for arenas, and the mistakes in it that these find."""

from __future__ import annotations

import pytest

from dagexec.scheduler.memory.arena_budget import ArenaBudget
from tests.machines.arena_world import Setting
from tests.machines.worlds import searched, with_other_futures
from tests.planted.bug import Edit, edited

SMALL = {
    "three models": Setting(((1,), (1,), (2,)), 2),
    "runs that need more than there is": Setting(((1, 3), (1,), (2,)), 2, refuses=True),
}

LARGE = {"four models": Setting(((1, 2), (1,), (2, 5), (3,)), 4)}
WORLDS = SMALL | LARGE


@pytest.mark.parametrize("name", SMALL)
def test_nothing_goes_wrong_in_a_small_world(name: str) -> None:
    found = searched(SMALL[name].world)
    assert (found.fault, found.path) == (None, ())
    assert found.exhausted


@pytest.mark.slow
def test_nothing_goes_wrong_in_a_larger_world() -> None:
    found = searched(LARGE["four models"].world, seconds=10)
    assert (found.fault, found.path) == (None, ())


@pytest.mark.slow
def test_what_has_one_state_has_one_future() -> None:
    assert with_other_futures(SMALL["three models"].world, 150) == []


MISTAKES = {
    "nobody gives anything back": (
        "three models", "an idle model keeps bytes that a run needs",
        Edit(ArenaBudget.charge, "over = self._used - self.nbytes", "over = 0"),
    ),
    "the youngest gives back first": (
        "three models", "a model gives back before one that has been idle for longer",
        Edit(ArenaBudget.charge, "entry.last_begun)", "-entry.last_begun)"),
    ),
    "all give back": (
        "three models", "a model gives back although there is room",
        Edit(ArenaBudget.charge, "            over -= freed\n", ""),
    ),
    "what a model had counts on": (
        "three models", "the budget counts other bytes than its models have",
        Edit(ArenaBudget._set, "nbytes - account.nbytes", "nbytes"),
    ),
    "who gave back is not asked again": (
        "three models", "an idle model keeps bytes that a run needs",
        Edit(ArenaBudget._set, "self._accounts[account] = None", "pass"),
    ),
    "one run may have more than there is": (
        "runs that need more than there is", "a run has more than there is",
        Edit(ArenaBudget.charge, "nbytes > self.nbytes and", "False and"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_machine_is_found(name: str) -> None:
    world, fault, mistake = MISTAKES[name]
    with edited((mistake,)):
        found = searched(SMALL[world].world)
    assert found.fault is not None
    assert fault in found.fault
