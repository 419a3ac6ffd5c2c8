"""What operators say of their rows (`OpSchema.rows`), tried on every one of them: examples together, and each alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from dagexec import Workspace
from dagexec.core.registry import operator_module, registered_operators, schema_of
from dagexec.core.row_axes import find_row_axes, rule_of
from dagexec.core.traits import Rows
from dagexec.errors import RowsError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.fuzz.near import same
from tests.rows.case import Array, Case, Given, Subject, of_examples
from tests.rows.operators import operator_cases

CASES = operator_cases()
TYPES = [
    name
    for name in registered_operators()
    if rule_of(schema_of(name)) is not None and operator_module(name).startswith("dagexec.ops.")
]
ACROSS_ALL = {
    "AveragedLoss", "AveragedLossGradient", "DynamicQuantLSTM", "DynamicQuantizeLinear", "LpNorm", "LpNormGradient",
    "ReduceTailSum", "ReduceTailSumGradient", "SumElements", "SumElementsGradient", "SumSqrElements",
    "SumSqrElementsGradient",
}  # fmt: skip
"""Their rule refuses whatever they are given, so there is no case."""

CHOSEN = (5, 0, 41)


def computed(subject: Subject, chosen: Sequence[int]) -> dict[str, Array]:
    workspace = Workspace()
    for name, array in {**subject.model.parameters, **subject.feeds(chosen)}.items():
        workspace.feed_blob(name, array)
    with SimpleNet(subject.model.net, workspace) as net:
        net.run()
    return {name: workspace.fetch_blob(name).copy() for name in subject.model.outputs}


def found_rows(subject: Subject) -> Mapping[str, Rows]:
    return find_row_axes(subject.model, subject.types(), subject.axes()).outputs


def assert_rows_are_apart(case: Case, subject: Subject, rows: Mapping[str, Rows]) -> None:
    """Raise AssertionError if an example alone gives other bytes than in a batch."""
    together = computed(subject, CHOSEN)
    for place, number in enumerate(CHOSEN):
        for name, alone in computed(subject, [number]).items():
            own = of_examples(together[name], rows.get(name), [place], len(CHOSEN))
            assert same(own, alone), (str(case), name)


@pytest.mark.parametrize("op_type", sorted(set(TYPES) - ACROSS_ALL))
def test_examples_are_where_the_rule_says_and_do_not_depend_on_each_other(op_type: str) -> None:
    cases = [case for case in CASES if case.op_type == op_type]
    assert cases, "an operator that has a rule needs a case in tests/rows/operators.py"
    for case in cases:
        subject = case.subject()
        assert_rows_are_apart(case, subject, found_rows(subject))


def at_another_axis(case: Case, axis: int) -> Case:
    """The case with examples on that axis of all inputs that have it, and two of what they were on before."""

    def moved(given: Given) -> Given:
        if given.axis is None or len(given.shape) <= axis:
            return given
        sizes = [2 if place == given.axis else size for place, size in enumerate(given.shape)]
        return replace(given, shape=(*sizes[:axis], 1, *sizes[axis + 1 :]), axis=axis)

    return replace(case, inputs=[moved(given) for given in case.inputs])


@pytest.mark.parametrize("op_type", sorted(set(TYPES) - ACROSS_ALL))
def test_on_another_axis_examples_are_refused_or_as_independent(op_type: str) -> None:
    calls: list[tuple[Case, Subject, Mapping[str, Rows]]] = []
    for case in [case for case in CASES if case.op_type == op_type]:
        for axis in range(max(len(given.shape) for given in case.inputs)):
            subject = at_another_axis(case, axis).subject()
            with suppress(RowsError, ShapeError):
                rows = found_rows(subject)
                calls.append((case, subject, rows))
    for case, subject, rows in calls:
        assert_rows_are_apart(case, subject, rows)


def test_cases_are_of_operators_that_have_a_rule() -> None:
    assert {case.op_type for case in CASES} <= set(TYPES)
