"""Stress cases have operators whose pieces workers share, and what is wrong with these is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dagexec.core.native import can_run
from dagexec.core.operator import Step
from dagexec.ops.kernels.tables import in_phases
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run import work
from dagexec.stress import operators
from dagexec.stress.case import Case, make_case
from dagexec.stress.nets import features_of
from dagexec.stress.operators import StressPieces
from dagexec.stress.runner import CaseFailedError, run_case

pytestmark = pytest.mark.skipif(not can_run(), reason="no machine code runs here")

WATCHED = range(0, 60, 3)
"""Seeds of cases with a detector."""

Plant = Callable[[pytest.MonkeyPatch], None]
Tables = Sequence[Sequence[Any]]


def with_pieces() -> list[Case]:
    cases = [make_case(seed, net_type="dag") for seed in WATCHED]
    return [case for case in cases if features_of(case.net().net)["operators in pieces"]]


def in_other_phases(change: Callable[[Tables], Tables]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        def changed(phases: Tables, keeps: object, label: str) -> Step:
            return in_phases(change(phases), keeps, label)

        patch.setattr(operators, "in_phases", changed)

    return plant


def outcome_of(case: Case) -> str:
    try:
        run_case(case)
    except CaseFailedError as error:
        return f"{error}\n"
    return ""


def one_scratch(patch: pytest.MonkeyPatch) -> None:
    """All pieces have the same line."""
    give = StressPieces.working_memory

    def shared(self: StressPieces, nbytes: int) -> object:
        given = self.given_memory
        return given[-1] if len(given) > 1 and given[-1].nbytes >= nbytes else give(self, nbytes)

    patch.setattr(StressPieces, "working_memory", shared)


def no_wait(patch: pytest.MonkeyPatch) -> None:
    """A phase of several pieces waits for nothing if the one before is such a phase, too."""
    chained = work._chained

    def without(plan: Any, pieces: Sequence[Sequence[int]]) -> TaskGraph:
        graph = chained(plan, pieces)
        children = [list(row) for row in graph.children]
        counts = list(graph.parent_counts)
        for task, count in enumerate(graph.pieces):
            for child in list(children[task]):
                if count > 1 and graph.pieces[child] > 1 and graph.chains[task] == graph.chains[child]:
                    children[task].remove(child)
                    counts[child] -= 1
        return TaskGraph(graph.pieces, children, counts, graph.chains)

    patch.setattr(work, "_chained", without)


def a_piece_never_taken(patch: pytest.MonkeyPatch) -> None:
    """Runs hand out all pieces of a phase but the last."""
    chained = work._chained
    patch.setattr(
        work, "_chained", lambda plan, rows: chained(plan, [[max(1, one - 1) for one in row] for row in rows])
    )


def test_some_cases_have_operators_in_pieces_and_pass() -> None:
    cases = with_pieces()
    assert len(cases) > len(WATCHED) / 3
    assert run_case(cases[0])["cases"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (in_other_phases(lambda phases: [[*phases[0], *phases[1]]]), "the second reads what the first writes"),
        (one_scratch, "both write the same bytes"),
        (in_other_phases(lambda phases: [phases[0], phases[1][1:]]), "bytes are written by no piece"),
        (in_other_phases(lambda phases: [phases[0], [*phases[1], phases[1][0]]]), "both write the same bytes"),
        (no_wait, "phase 1: does not wait for phase 0"),
        (a_piece_never_taken, "piece 3: was not executed"),
    ],
    ids=["merged phases", "one scratch", "a piece less", "a piece twice", "no wait", "a piece never taken"],
)
def test_what_is_wrong_with_pieces_is_found(plant: Plant, said: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = "".join(map(outcome_of, with_pieces()))
    assert said in found
