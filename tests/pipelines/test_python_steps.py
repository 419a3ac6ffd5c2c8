"""Python steps of a pipeline: operators with declared types, whose errors name stage and pipeline."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec.core.proto import NetDef
from dagexec.core.python_step import PythonStep
from dagexec.errors import AccessError, DagexecError, OperatorError, ShapeError
from tests.pipelines.layers import dense

X = np.arange(12, dtype=np.float32).reshape(6, 2)


def pipeline(function: Callable[..., Any], outputs: Any, **options: Any) -> dagexec.Pipeline:
    p = dagexec.Pipeline("reading")
    stage = p.python("step", function, p.input("x", "float32", ("N", 2)), outputs, **options)
    for name, value in stage.outputs.items():
        p.output(f"{name} out", value)
    return p


def run(p: dagexec.Pipeline, x: Any = X, **options: Any) -> dict[str, Any]:
    with dagexec.compile(p, **options) as executor:
        return executor.run({"x": x})


@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_sizes_that_a_step_chooses_reach_the_models_behind_it(net_type: str, device: str) -> None:
    layer = dense("layer", 2, 4)
    p = dagexec.Pipeline("p")
    rows = p.python("rows", lambda x: x[x[:, 0] > x[0, 1]], p.input("x", "float32[N, 2]"), "float32[M, 2]")
    p.output("y", p.stage("layer", layer, rows))
    with (
        dagexec.compile(layer, device=device) as alone,
        dagexec.compile(p, net_type=net_type, device=device) as executor,
    ):
        for x in (X, X[::-1].copy(), X[:1], np.concatenate([X, X])):
            expected = alone.run({"x": x[x[:, 0] > x[0, 1]]})["y"]
            assert executor.run({"x": x})["y"].tobytes() == expected.tobytes()


def test_results_may_be_a_tuple_or_a_mapping() -> None:
    types = {"low": "float32[2]", "high": "float32[2]", "count": "int64[]"}
    for function in (
        lambda x: (x.min(0), x.max(0), len(x)),
        lambda x: {"count": len(x), "high": x.max(0), "low": x.min(0)},
    ):
        found = run(pipeline(function, types))
        assert {name: array.tolist() for name, array in found.items()} == {
            "low out": [0, 1], "high out": [10, 11], "count out": 6
        }  # fmt: skip


def test_strings_are_results() -> None:
    found = run(pipeline(lambda x: [str(int(row.sum())) for row in x], "string[N]"))["step out"]
    assert found.tolist() == [b"1", b"5", b"9", b"13", b"17", b"21"]


WRONG: dict[str, tuple[Callable[..., Any], Any]] = {
    r"output 'step' is declared float32\[N, 2\] with N = 6, got float64\[6, 2\]": (
        lambda x: x.astype(np.float64), "float32[N, 2]"
    ),
    r"output 'step' is declared float32\[N, 2\] with N = 6, got float32\[5, 2\]": (lambda x: x[1:], "float32[N, 2]"),
    r"output 'step' is declared float32\[M, 3\], got float32\[6, 2\]": (lambda x: x, "float32[M, 3]"),
    r"output 'b' is declared float32\[M\] with N = 6, M = 2, got float32\[3\]": (
        lambda x: (x[:2, 0], x[:3, 0]), {"a": "float32[M]", "b": "float32[M]"}
    ),
    r"the function gave 1 results, and declares 2: \['a', 'b'\]": (
        lambda x: x, {"a": "float32[N, 2]", "b": "float32[N, 2]"}
    ),
    r"the function gave \['a', 'c'\], and declares \['a', 'b'\]": (
        lambda x: {"a": x, "c": x}, {"a": "float32[N, 2]", "b": "float32[N, 2]"}
    ),
    r"output 'step' is no array": (lambda x: [x, x[:1]], "float32[M]"),
    r"output 'step' has a int among its strings": (lambda _: np.array([b"a", 3], object), "string[M]"),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_a_result_that_is_not_as_declared_is_refused(message: str) -> None:
    function, outputs = WRONG[message]
    message = message.replace(" with N = 6, M = 2", " with M = 2")
    with pytest.raises(OperatorError, match=rf"Python 'step' \(operator 0\) of net 'reading': {message}") as caught:
        run(pipeline(function, outputs))
    assert isinstance(caught.value.__cause__, ShapeError)


def test_an_exception_of_a_step_names_stage_and_pipeline_and_the_next_run_works() -> None:
    def divide(x: Any) -> Any:
        if x[0, 0] == 1:
            raise KeyError("no such page")
        return x

    with dagexec.compile(pipeline(divide, "float32[N, 2]")) as executor:
        with pytest.raises(OperatorError, match=r"Python 'step'.* of net 'reading' failed: KeyError: 'no such page'"):
            executor.run({"x": np.ones_like(X)})
        assert executor.run({"x": X})["step out"].tobytes() == X.tobytes()


def clear(x: Any) -> Any:
    x[:] = 0
    return x


def clear_a_part(x: Any) -> Any:
    x.reshape(-1)[:1].fill(0)
    return x


def clear_by_force(x: Any) -> Any:
    x.setflags(write=True)
    return clear(x)


@pytest.mark.parametrize("function", [clear, clear_a_part, clear_by_force])
@pytest.mark.parametrize("behind_a_model", [False, True])
def test_a_step_cannot_write_what_it_reads(function: Callable[..., Any], behind_a_model: bool) -> None:
    """Another stage reads it too, at the same time."""
    layer = dense("layer", 2, 2)
    p = dagexec.Pipeline("reading")
    x = p.input("x", "float32", ("N", 2))
    value = p.stage("before", layer, x) if behind_a_model else x
    p.output("beside", p.stage("beside", layer, x=value))
    p.output("y", p.python("step", function, value, "float32[N, 2]"))
    given = X.copy()
    with (
        dagexec.compile(p, num_workers=2) as executor,
        pytest.raises(OperatorError, match=r"Python 'step'.*(read-only|WRITEABLE)"),
    ):
        executor.run({"x": given})
    np.testing.assert_array_equal(given, X)


def test_inputs_are_checked_against_what_a_step_takes() -> None:
    p = pipeline(lambda x: x, "float32[4, 2]", takes=["float32[4, 2]"])
    assert run(p, X[:4])["step out"].tobytes() == X[:4].tobytes()
    with pytest.raises(DagexecError, match=r"Python 'step'.*input 'x' must be float32\[4, 2\], found float32\[6, 2\]"):
        run(p)


def test_a_step_is_neither_merged_nor_computed_ahead_nor_left_out() -> None:
    calls: list[int] = []

    def count(x: Any) -> Any:
        calls.append(1)
        return x + np.float32(len(calls))

    p = dagexec.Pipeline("p")
    x = p.input("x", "float32[2]")
    for name in ("one", "two"):
        p.output(f"{name} y", p.python(name, count, x, "float32[2]"))
    with dagexec.compile(p, net_type="simple") as executor:
        calls.clear()
        found = executor.run({"x": np.zeros(2, np.float32)})
        assert sorted(array[0] for array in found.values()) == [1, 2]
        assert len(calls) == 2


def test_a_model_file_cannot_name_a_function() -> None:
    guessed = dagexec.op(
        "Python", "x", "y", function="os:system", takes=["any[...]"], gives=["any[...]"], results=["y"]
    )
    model = dagexec.Model("m", NetDef(name="m", op=[guessed]), inputs={"x": dagexec.InputInfo()}, outputs=("y",))
    with pytest.raises(AccessError, match=r"Python 'y' \(operator 0\) of net 'm': its function is not known here"):
        dagexec.compile(model)


def test_a_function_is_forgotten_with_its_pipeline() -> None:
    def function(x: Any) -> Any:
        return x

    gone = weakref.ref(function)
    run(pipeline(function, "float32[N, 2]"))
    del function
    gc.collect()
    assert gone() is None


def test_a_step_behind_a_pickle_is_found_by_its_token() -> None:
    step = PythonStep(os.path.join)
    made, arguments = step.__reduce__()
    assert made(*arguments).token == step.token


def test_a_named_cost_orders_operators() -> None:
    p = pipeline(lambda x: x, "float32[N, 2]", seconds=0.5)
    with dagexec.compile(p, net_type="dag") as executor:
        executor.run({"x": X})
        assert 0.5 <= max(executor.net().plan.seconds) < 0.51
