"""Running passes: their order, names and reports."""

from __future__ import annotations

import pytest

from dagexec.compiler.passes import Draft, Pass, run_passes
from dagexec.compiler.passes.operator_traits import of_type
from dagexec.core.model import Model
from dagexec.core.node import Node
from dagexec.core.proto import NetDef
from dagexec.errors import ArgumentError
from tests.compiler.passes.models import op


def _appending(name: str) -> Pass:
    """A pass that adds an operator called after itself."""

    def edit(draft: Draft) -> None:
        program = draft.model.program.with_operators([*draft.nodes(), Node("NoOp", outputs=[name])])
        draft.become(draft.model.changed(net=program), [f"added {name}"])

    return Pass(name, "Adds an operator.", edit)


MODEL = Model("m", NetDef(name="m"))
PASSES = (_appending("one"), _appending("two"), _appending("one"))


def test_passes_run_in_the_order_of_the_list_and_each_reports_what_it_did() -> None:
    report = run_passes(MODEL, PASSES)
    assert [definition.output[0] for definition in report.model.net.op] == ["one", "two", "one"]
    assert [outcome.name for outcome in report.outcomes] == ["one", "two", "one"]
    assert [(o.operators_before, o.operators_after) for o in report.outcomes] == [(0, 1), (1, 2), (2, 3)]
    assert report.outcomes[1].changes == ("added two",)
    assert report.changes == 3
    assert not MODEL.net.op


def test_a_pass_is_switched_off_by_name_wherever_it_stands() -> None:
    report = run_passes(MODEL, PASSES, without={"one"})
    assert [definition.output[0] for definition in report.model.net.op] == ["two"]


def test_an_unknown_name_is_refused_with_the_list_of_passes() -> None:
    with pytest.raises(ArgumentError, match=r"no pass 'tow'; the passes are one, two; did you mean 'two'\?$"):
        run_passes(MODEL, PASSES, without=["tow"])


def test_a_pass_is_not_entered_where_no_operator_is_of_a_type_that_it_needs() -> None:
    entered: list[list[int]] = []
    net = NetDef(name="m", op=[op("Abs", ["x"], ["a"]), op("Relu", ["a"], ["b"]), op("Abs", ["b"], ["y"])])

    def looking_for(*types: str) -> Pass:
        traits = tuple(map(of_type, types))
        return Pass("look", "Looks.", lambda draft: entered.append(draft.having(traits[0])), needs=traits)

    report = run_passes(Model("m", net), [looking_for("Abs"), looking_for("Tanh"), looking_for("Relu", "Tanh")])
    assert entered == [[0, 2]]
    assert [(one.name, one.changes, one.operators_after) for one in report.outcomes] == 3 * [("look", (), 3)]
