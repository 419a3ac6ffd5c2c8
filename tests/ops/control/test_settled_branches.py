"""If whose results have known types: by a condition that follows from shapes, or with two nets that agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import dagexec
from dagexec import NetDef, Workspace, op
from dagexec.core.model import InputInfo, Model
from dagexec.errors import OperatorError
from dagexec.scheduler.plan.dynamic import CheckedStep
from dagexec.tracing import Trace
from tests.nets import temporary_operator

Array = npt.NDArray[Any]
NETS = [("simple", None), ("dag", 1), ("dag", 2), ("async_dag", 2)]


def branch(name: str, operators: list[Any], captured: list[str], results: list[str]) -> NetDef:
    return NetDef(name=name, op=operators, external_input=captured, external_output=results)


def by_last_axis(then: NetDef, other: NetDef, inputs: list[str], outputs: list[str], names: list[str]) -> list[Any]:
    """`then` runs where the last axis of x has length 1."""
    return [
        op("Shape", ["x"], ["shape"]),
        op("Gather", ["shape", "last"], ["length"]),
        op("EQ", ["length", "single"], ["is_single"]),
        op("If", ["is_single", *inputs], outputs, then_net=then, else_net=other, captured=names),
    ]


def squeezed() -> list[Any]:
    """Relu of x without its last axis if that is one long, else of twice x; and y, whichever it is, plus 1."""
    return [
        *by_last_axis(
            branch("t", [op("Squeeze", ["v"], ["s"], dims=[1])], ["v"], ["s"]),
            branch("e", [op("Add", ["v", "v"], ["d"])], ["v"], ["d"]),
            ["x"], ["y"], ["v"],
        ),
        op("Relu", ["y"], ["z"]),
    ]  # fmt: skip


def workspace_of(x: Array) -> Workspace:
    workspace = Workspace()
    workspace.feed_blob("x", x)
    for name, value in {"last": 1, "single": 1}.items():
        workspace.feed_blob(name, np.array([value]))
        workspace.get_blob(name).tensor().freeze()
    return workspace


def net_of(operators: list[Any]) -> NetDef:
    return NetDef(name="outer", op=operators, external_input=["x", "last", "single"])


def executor_of(operators: list[Any], *outputs: str, **fed: Array) -> dagexec.Executor:
    """Of operators that read x, constants, and what is `fed` beside x."""
    constants = {"last": np.array([1]), "single": np.array([1]), "three": np.array(3)}
    net = NetDef(name="outer", op=operators, external_input=["x", *constants, *fed])
    inputs = {name: InputInfo(None, None) for name in ("x", *fed)}
    model = Model("outer", net, inputs=inputs, outputs=outputs, parameters=constants)
    return dagexec.compile(model, optimize=False)


X = [np.float32([[-1], [2]]), np.float32([[-1, 3, 5]]), np.float32([[4], [-5], [6]]), np.float32([[0, 7]])]


def expected(x: Array) -> Array:
    return np.maximum(x[:, 0] if x.shape[1] == 1 else 2 * x, 0)


@pytest.mark.parametrize(("kind", "workers"), NETS)
def test_each_shape_takes_its_branch_and_finds_it_again(kind: str, workers: int | None) -> None:
    workspace = workspace_of(X[0])
    net = workspace.build_net(net_of(squeezed()), kind, workers)
    for x in [*X, *X, *reversed(X)]:
        workspace.feed_blob("x", x)
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("z"), expected(x))
    net.close()


def test_an_executor_takes_any_of_the_shapes() -> None:
    with executor_of(squeezed(), "z") as executor:
        for x in [*X, *X]:
            for _ in range(3):
                np.testing.assert_array_equal(executor.run({"x": x})["z"], expected(x))


def test_nothing_is_left_to_the_run_to_prepare() -> None:
    with executor_of(squeezed(), "z") as executor:
        executor.run({"x": X[0]})
        steps = executor.net().prepared().steps
    assert not any(isinstance(step, CheckedStep) for step in steps)


def test_branches_in_branches_and_results_that_are_nobodys_own() -> None:
    """What a branch gives may be what it captured, one value twice, or what a branch inside gave."""
    inner = [
        op("Size", ["v"], ["n"]),
        op("EQ", ["n", "three"], ["is_three"]),
        op(
            "If", ["is_three", "v"], ["r"], captured=["w"],
            then_net=branch("three", [op("Sub", ["w", "w"], ["zero"])], ["w"], ["zero"]),
            else_net=branch("other", [], ["w"], ["w"]),
        ),
        op("Negative", ["r"], ["m"]),
    ]  # fmt: skip
    then = branch("t", inner, ["v", "three"], ["m", "m", "v"])
    other = branch("e", [], ["v", "three"], ["v", "v", "v"])
    operators = by_last_axis(then, other, ["x", "three"], ["a", "b", "c"], ["v", "three"])
    with executor_of(operators, "a", "b", "c") as executor:
        for x in [*X, *X]:
            found = executor.run({"x": x})
            first = x if x.shape[1] != 1 else 0 * x if x.size == 3 else -x
            for name, values in {"a": first, "b": first, "c": x}.items():
                np.testing.assert_array_equal(found[name], values)
        assert not any(isinstance(step, CheckedStep) for step in executor.net().prepared().steps)


def test_a_value_of_the_run_that_shapes_inside_depend_on_is_left_to_the_run() -> None:
    """Reshape takes its shape from an input: neither it nor the If around it can be prepared before."""
    then = branch("t", [op("Reshape", ["v", "s"], ["r", "old"])], ["v", "s"], ["r"])
    other = branch("e", [], ["v", "s"], ["v"])
    operators = by_last_axis(then, other, ["x", "wanted"], ["y"], ["v", "s"])
    x = np.arange(4, dtype=np.float32)[:, None]
    with executor_of(operators, "y", wanted=np.array([2, 2])) as executor:
        for wanted in ([2, 2], [4], [1, 4], [2, 2]):
            found = executor.run({"x": x, "wanted": np.array(wanted)})["y"]
            assert found.tolist() == x.reshape(wanted).tolist()


def test_an_error_names_the_outer_operator_the_branch_and_the_inner_operator() -> None:
    def fail(operator: Any) -> None:
        if operator.x(0)[0, 0] < 0:
            raise ValueError("negative")
        operator.y(0)[...] = operator.x(0).max()

    then = branch("t", [op("Copy", ["v"], ["c"]), op("Fails", ["c"], ["d"], name="f")], ["v"], ["d"])
    other = branch("e", [], ["v"], ["v"])
    with temporary_operator("Fails", fail):
        operators = by_last_axis(then, other, ["x"], ["y"], ["v"])
        with executor_of(operators, "y") as executor:
            assert executor.run({"x": np.float32([[4], [5]])})["y"] == 5
            assert executor.run({"x": X[1]})["y"].tolist() == X[1].tolist()
            with pytest.raises(
                OperatorError, match=r"If .*\(operator 3\) of net 'outer', then_net: Fails 'f' .*negative"
            ):
                executor.run({"x": X[0]})
            assert executor.run({"x": np.float32([[6], [1]])})["y"] == 6


def test_a_trace_has_spans_for_the_operators_inside() -> None:
    with executor_of(squeezed(), "z") as executor:
        executor.run({"x": X[1]})
        trace = Trace()
        executor.run({"x": X[1]}, trace=trace)
    assert {span.inner.split()[0] for span in trace.spans if span.inner} == {"Add"}


def chosen(then: NetDef, other: NetDef, *outputs: str) -> list[Any]:
    """An If by an input, and an operator behind it."""
    names = list(then.external_input)
    choice = op("If", ["yes", *["x"] * len(names)], outputs, then_net=then, else_net=other, captured=names)
    return [choice, op("Negative", [outputs[0]], ["n"])]


def test_where_both_branches_give_one_type_a_run_has_only_to_choose() -> None:
    then = branch("t", [op("Add", ["v", "v"], ["d"]), op("Relu", ["d"], ["r"])], ["v"], ["r", "d"])
    other = branch(
        "e", [op("Squeeze", ["v"], ["s"], dims=[0]), op("ExpandDims", ["s"], ["u"], dims=[0])], ["v"], ["u", "v"]
    )
    yes = np.array(True)
    with executor_of(chosen(then, other, "y", "z"), "n", "z", yes=yes) as executor:
        for x in [np.float32([[-1, 2]]), np.float32([[3, -4, 5]])] * 2:
            for condition in (yes, ~yes, ~yes, yes):
                found = executor.run({"x": x, "yes": condition})
                n, z = (-np.maximum(2 * x, 0), 2 * x) if condition else (-x, x)
                np.testing.assert_array_equal(found["n"], n)
                np.testing.assert_array_equal(found["z"], z)
        assert not any(isinstance(step, CheckedStep) for step in executor.net().prepared().steps)


def test_a_branch_that_does_not_fit_the_shapes_fails_only_when_it_is_chosen() -> None:
    then = branch("t", [op("Squeeze", ["v"], ["s"], dims=[0])], ["v"], ["s"])
    other = branch("e", [op("Relu", ["v"], ["r"])], ["v"], ["r"])
    with executor_of(chosen(then, other, "y"), "n", yes=np.array(True)) as executor:
        assert executor.run({"x": X[1], "yes": np.array(True)})["n"].tolist() == [1, -3, -5]
        assert executor.run({"x": X[0], "yes": np.array(False)})["n"].tolist() == [[0], [-2]]
        with pytest.raises(OperatorError, match=r"then_net: .*Squeeze"):
            executor.run({"x": X[0], "yes": np.array(True)})
        assert executor.run({"x": X[0], "yes": np.array(False)})["n"].tolist() == [[0], [-2]]


def test_an_error_of_a_branch_that_a_run_chose_says_where_it_was() -> None:
    def fail(operator: Any) -> None:
        raise ValueError(f"found {operator.x(0)[0, 0]}")

    then = branch("t", [op("Fails", ["v"], ["d"], name="f")], ["v"], ["d"])
    other = branch("e", [op("Fails", ["v"], ["d"], name="g")], ["v"], ["d"])
    with temporary_operator("Fails", fail), executor_of(chosen(then, other, "y"), "n", yes=np.array(True)) as executor:
        for condition, name in [(True, "then_net: Fails 'f'"), (False, "else_net: Fails 'g'"), (True, "then_net")]:
            with pytest.raises(OperatorError, match=rf"operator 0\) of net 'outer', {name}.*found 4"):
                executor.run({"x": X[2], "yes": np.array(condition)})
