"""Each planted bug is found by the tool that the catalog names, and where it is not planted nothing is found."""

from __future__ import annotations

import re

import pytest

from dagexec.scheduler.exploration import explore_seeds, reduction
from dagexec.scheduler.exploration.fewest import fewest_preemptions
from tests.planted import deep
from tests.planted.bug import Bug, Edit, EditError, planted
from tests.planted.catalog import BUGS
from tests.selection import ROOT

MOST = 10_000
SAMPLED = [bug for bug in BUGS if bug.found_by == "schedules"]


def slowly(bugs: list[Bug] | tuple[Bug, ...]) -> list[object]:
    """As parameters, those marked that take long to find."""
    return [pytest.param(bug, id=bug.name, marks=[pytest.mark.slow] if bug.slow else []) for bug in bugs]


def look(bug: Bug, most: int) -> tuple[BaseException | None, int]:
    """What the scene of `bug` raises, and in how many schedules at most `most`."""
    if bug.found_by == "schedules":
        found = explore_seeds(bug.scene, range(most), timeouts=bug.timeouts)
        return None if found.failed is None else found.failed.failure, found.tried
    try:
        bug.scene()
    except Exception as error:
        return error, 1
    return None, 1


@pytest.mark.parametrize("bug", slowly(BUGS))
def test_a_planted_bug_is_found_by_its_tool_and_nothing_without_it(bug: Bug) -> None:
    with planted(bug):
        error, tried = look(bug, MOST)
    assert error is not None, f"{bug.broken}: not found"
    assert re.search(bug.says, str(error)), error
    assert look(bug, tried) == (None, tried)


@pytest.mark.slow
@pytest.mark.parametrize("bug", SAMPLED, ids=lambda bug: bug.name)
def test_a_schedule_that_shows_a_planted_bug_is_replayed_and_needs_few_preemptions(bug: Bug) -> None:
    with planted(bug):
        failed = explore_seeds(bug.scene, range(MOST), timeouts=bug.timeouts).failed
        assert failed is not None
        assert failed.replay(bug.scene).trace == failed.trace
        assert fewest_preemptions(bug.scene, failed, seconds=20).preemptions <= 3


@pytest.mark.slow
@pytest.mark.parametrize("bug", deep.BUGS, ids=lambda bug: bug.name)
def test_random_walks_miss_a_bug_that_needs_a_long_exact_sequence(bug: Bug) -> None:
    with planted(bug):
        assert explore_seeds(bug.scene, range(500), strategy="random").failed is None


@pytest.mark.slow
@pytest.mark.parametrize("bug", deep.BUGS[:2], ids=lambda bug: bug.name)
def test_reduction_finds_a_bug_that_random_walks_miss_in_few_schedules(bug: Bug) -> None:
    with planted(bug):
        found = reduction(bug.scene, 100, race_free=True)
    assert found.failed is not None
    assert re.search(bug.says, str(found.failed.failure))


def test_the_page_lists_every_bug_with_what_finds_it() -> None:
    page = (ROOT / "docs" / "exploration.md").read_text()
    for bug in BUGS:
        assert re.search(rf"^\| {re.escape(bug.name)} \| .* \| {bug.found_by} \|", page, re.MULTILINE), bug.name


def test_the_catalog_has_thirty_bugs_of_many_kinds_and_six_of_other_executors() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 30
    assert len({bug.family for bug in BUGS}) >= 8
    reports = [bug.modeled_on for bug in BUGS if bug.modeled_on]
    assert len(reports) >= 6
    assert all(re.match(r"[\w.-]+/[\w.-]+#\d+: ", report) for report in reports)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_fits_the_code_and_is_taken_out_again(bug: Bug) -> None:
    before = [edit.function.__code__ for edit in bug.edits if hasattr(edit.function, "__code__")]
    with planted(bug):
        pass
    assert [edit.function.__code__ for edit in bug.edits if hasattr(edit.function, "__code__")] == before


def doubled(number: int) -> int:
    return 2 * number


def test_an_edit_changes_a_function_under_whatever_name_it_is_known() -> None:
    other = doubled
    bug = Bug("it", "none", "", (Edit(doubled, "2 * number", "3 * number"),), lambda: None, "proof", "")
    with planted(bug):
        assert other(2) == 6
    assert other(2) == 4


@pytest.mark.parametrize(("before", "after"), [("5 * number", ""), ("number", "x"), ("2 * number", "2 * number")])
def test_an_edit_that_does_not_fit_is_refused(before: str, after: str) -> None:
    bug = Bug("it", "none", "", (Edit(doubled, before, after),), lambda: None, "proof", "")
    with pytest.raises(EditError, match=r"it: doubled has its text \d times"), planted(bug):
        pass
