"""Models composed to a pipeline run as one net, and give what they give one after another."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import dagexec
import dagexec.errors
from dagexec.analysis import compare
from dagexec.core.dtypes import FLOAT32
from dagexec.scheduler.hazards import check_net
from dagexec.testing import detecting
from tests.pipelines.layers import adding, dense, dense_by_formula

Array = npt.NDArray[Any]

A, B, C = dense("a", 8, 16, 1), dense("b", 16, 16, 2), dense("c", 16, 16, 3)
X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)


def mean(first: Array, second: Array) -> Array:
    return (first + second) / np.float32(2)


def diamond() -> dagexec.Pipeline:
    """A feeds B and C, and both feed a Python step D."""
    p = dagexec.Pipeline("diamond")
    a = p.stage("A", A, p.input("x", "float32", ("N", 8)))
    b, c = p.stage("B", B, x=a), p.stage("C", C, x=a)
    p.output("y", p.python("D", mean, [b, c], "float32[N, 16]", row_wise=True))
    return p


def diamond_by_hand(x: Array, **options: Any) -> Array:
    with (
        dagexec.compile(A, **options) as a,
        dagexec.compile(B, **options) as b,
        dagexec.compile(C, **options) as c,
    ):
        h = a.run({"x": x})["y"]
        return mean(b.run({"x": h})["y"], c.run({"x": h})["y"])


def diamond_by_formula(x: Array) -> Array:
    h = dense_by_formula(A, x)
    return (dense_by_formula(B, h) + dense_by_formula(C, h)) / 2


NETS: list[dict[str, Any]] = [
    {"net_type": "simple"},
    {"net_type": "dag", "num_workers": 2},
    {"net_type": "async_dag", "num_workers": 2},
    {"net_type": "async_dag", "num_workers": 2, "device": "sim:0"},
    {"net_type": "dag", "num_workers": 2, "optimize": False},
    {},
]


@pytest.mark.parametrize("options", NETS, ids=str)
def test_a_diamond_gives_the_bytes_of_its_models_one_after_another(options: dict[str, Any]) -> None:
    by_hand = {key: value for key, value in options.items() if key in ("optimize", "device")}
    with dagexec.compile(diamond(), **options) as executor:
        found = executor.run({"x": X})["y"]
    assert found.tobytes() == diamond_by_hand(X, **by_hand).tobytes()
    np.testing.assert_allclose(found, diamond_by_formula(X), rtol=1e-4, atol=1e-4)


def test_branches_of_two_models_are_chains_of_one_plan() -> None:
    with dagexec.compile(diamond(), optimize=False, net_type="dag", num_workers=2) as executor:
        executor.run({"x": X})
        plan = executor.net().plan
        stages = [{plan.graph.operators[one].name.split("/")[0] for one in chain} for chain in plan.chains]
        assert {"B"} in stages
        assert {"C"} in stages


def test_operators_blobs_and_parameters_are_named_after_their_stage() -> None:
    model = dagexec.load_model(diamond())
    assert [(one.type, one.name, *one.output) for one in model.net.op] == [
        ("FC", "A/product", "A/h"),
        ("Relu", "A/y", "A/y"),
        ("FC", "B/product", "B/h"),
        ("Relu", "B/y", "B/y"),
        ("FC", "C/product", "C/h"),
        ("Relu", "C/y", "C/y"),
        ("Python", "D", "y"),
    ]
    assert sorted(model.parameters) == ["A/b", "A/w", "B/b", "B/w", "C/b", "C/w"]
    assert str(model.inputs["x"]) == "float32[?, 8]"
    assert model.outputs == ("y",)


def test_parameters_are_the_arrays_of_the_models() -> None:
    p = dagexec.Pipeline("p")
    first = p.stage("first", B, p.input("x"))
    p.output("y", p.stage("second", B, x=first))
    parameters = dagexec.load_model(p).parameters
    assert parameters["first/w"] is B.parameters["w"]
    assert parameters["second/w"] is B.parameters["w"]


def test_a_model_that_writes_its_input_leaves_it_to_others() -> None:
    p = dagexec.Pipeline("p")
    x, y = p.input("x"), p.input("y")
    inner = p.stage("adding", adding("adding", 4), first=x, second=y)
    outer = p.stage("again", adding("adding", 4), first=x, second=inner["first"])
    for name, value in {"sum": inner["first"], "twice": inner["twice"], "all": outer["first"]}.items():
        p.output(name, value)
    p.output("more", outer["twice"])
    first, second = np.arange(8, dtype=np.float32).reshape(2, 4), np.full((2, 4), 3, np.float32)
    for options in NETS:
        with dagexec.compile(p, **options) as executor:
            found = executor.run({"x": first, "y": second})
        np.testing.assert_array_equal(found["sum"], first + second)
        np.testing.assert_array_equal(found["twice"], 2 * second)
        np.testing.assert_array_equal(found["all"], 2 * first + second)
        np.testing.assert_array_equal(found["more"], 2 * (first + second))


def test_names_with_the_separator_in_models_stay_apart() -> None:
    """Blob "y" of stage "s/..." would be blob "b/y" of a stage "s" of another model."""
    inside = dagexec.NetDef(name="n", op=[dagexec.op("Scale", "b/x", "s/y", scale=3.0)])
    info = {"b/x": dagexec.InputInfo(FLOAT32, (2,))}
    odd = dagexec.Model("n", inside, inputs=info, outputs=("s/y",))
    p = dagexec.Pipeline("p")
    x = p.input("a/x")
    first = p.stage("s", odd, {"b/x": x})
    second = p.stage("b", odd, {"b/x": first["s/y"]})
    p.output("a/y", second["s/y"])
    p.output("same", second)
    p.output("a/x", x)
    p.output("copy", x)
    with dagexec.compile(p) as executor:
        found = executor.run({"a/x": np.array([1, 2], np.float32)})
    assert {name: array.tolist() for name, array in found.items()} == {
        "a/y": [9, 18], "same": [9, 18], "a/x": [1, 2], "copy": [1, 2]
    }  # fmt: skip


def test_an_output_may_be_a_parameter() -> None:
    model = dagexec.Model("m", A.net, parameters=A.parameters, inputs=A.inputs, outputs=("y", "b"))
    p = dagexec.Pipeline("p")
    stage = p.stage("A", model, p.input("x"))
    p.output("y", stage["y"])
    p.output("bias", stage["b"])
    with dagexec.compile(p) as executor:
        np.testing.assert_array_equal(executor.run({"x": X})["bias"], A.parameters["b"])


def test_an_init_net_is_run_for_its_stage() -> None:
    fill = dagexec.NetDef(op=[dagexec.op("GivenTensorFill", [], "w", shape=[4], values=[1.0, 2.0, 3.0, 4.0])])
    net = dagexec.NetDef(name="n", op=[dagexec.op("Mul", ["x", "w"], "y")])
    info = {"x": dagexec.InputInfo(FLOAT32, (4,))}
    model = dagexec.Model("n", net, fill, inputs=info, outputs=("y",))
    p = dagexec.Pipeline("p")
    p.output("z", p.stage("two", model, x=p.stage("one", model, p.input("x"))))
    with dagexec.compile(p) as executor:
        assert executor.run({"x": np.ones(4, np.float32)})["z"].tolist() == [1, 4, 9, 16]


def test_random_numbers_are_those_of_the_model_alone() -> None:
    drop = dagexec.op("Dropout", "x", ["y", "mask"], ratio=0.5, is_test=0)
    drop.device_option.random_seed = 5
    info = {"x": dagexec.InputInfo(FLOAT32, (64,))}
    model = dagexec.Model("m", dagexec.NetDef(name="m", op=[drop]), inputs=info, outputs=("y",))
    p = dagexec.Pipeline("p")
    p.output("out", p.stage("drop", model, p.input("x")))
    feeds = {"x": np.ones(64, np.float32)}
    with dagexec.compile(model) as alone, dagexec.compile(p) as executor:
        expected = alone.run(feeds)["y"]
        assert expected.min() == 0
        assert executor.run(feeds)["out"].tobytes() == expected.tobytes()


def test_a_pipeline_may_be_a_stage() -> None:
    p = dagexec.Pipeline("outer")
    x = p.input("x", "float32", (None, 8))
    p.output("twice", p.python("twice", lambda y: y * 2, p.stage("inner", diamond(), x=x), "float32[?, 16]"))
    with dagexec.compile(p) as executor:
        assert executor.run({"x": X})["twice"].tobytes() == (diamond_by_hand(X) * 2).tobytes()
        assert "inner/D" in {one.name for one in executor.net().plan.graph.operators}


def test_a_pipeline_is_proved_and_watched_as_one_net() -> None:
    with dagexec.compile(diamond(), net_type="async_dag", device="sim:0", num_workers=2) as executor:
        with detecting() as detector:
            executor.run({"x": X}, trace=detector)
        assert check_net(executor.net(), 4).holds


def test_compare_runs_a_pipeline_under_all_nets() -> None:
    result = compare(diamond(), feeds={"x": X}, repeat=1, workers=(2,))
    assert result.agrees


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_requests_are_joined_where_the_steps_are_row_wise() -> None:
    async with dagexec.compile_async(diamond(), max_batch=4) as executor:
        found = await asyncio.gather(*(executor.run_async({"x": X[row : row + 1]}) for row in range(6)))
    assert np.concatenate([one["y"] for one in found]).tobytes() == diamond_by_hand(X).tobytes()


def test_requests_are_not_joined_where_a_step_may_mix_rows() -> None:
    p = dagexec.Pipeline("mixing")
    a = p.stage("A", A, p.input("x", "float32", ("N", 8)))
    p.output("y", p.python("normalize", lambda x: x - x.mean(0), a, "float32[N, 16]"))
    with pytest.raises(dagexec.errors.RowsError, match=r"Python 'normalize'.*not declared row_wise"):
        dagexec.compile(p, max_batch=4)


def test_a_model_with_python_steps_survives_a_pickle() -> None:
    p = dagexec.Pipeline("p")
    p.output("y", p.python("mean", mean, [p.input("a", "float32[4]"), p.input("b", "float32[4]")], "float32[4]"))
    model = dagexec.load_model(p)
    fields = {name: getattr(model, name) for name in ("inputs", "outputs", "python_steps")}
    copied = pickle.loads(pickle.dumps({**fields, "net": model.net.SerializeToString()}))
    net = dagexec.NetDef.FromString(copied.pop("net"))
    with dagexec.compile(dagexec.Model("copy", net, **copied)) as executor:
        found = executor.run({"a": np.ones(4, np.float32), "b": np.zeros(4, np.float32)})
    assert found["y"].tolist() == [0.5] * 4
