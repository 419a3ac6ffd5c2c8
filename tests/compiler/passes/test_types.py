"""What is known of blobs before a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dagexec.compiler.passes import types as types_module
from dagexec.compiler.passes.catalog import FINISHING, SIMPLIFYING
from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.engine import ENGINE
from dagexec.compiler.passes.layout import layout_pass
from dagexec.compiler.passes.low_precision import with_precision
from dagexec.compiler.passes.rewriting import run_passes
from dagexec.compiler.passes.types import KnownTypes, infer_types
from dagexec.core.dtypes import FLOAT32
from dagexec.core.inference import Probed, probed_outputs
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node, new_node
from dagexec.ops.base.layout import NHWC
from tests.compiler.passes.models import model_of, normal, op, types_of


def test_a_size_that_depends_on_a_free_axis_is_unknown() -> None:
    operators = [op("Conv", ["x", "w"], ["c"], kernel=3), op("AveragePool", ["c"], ["p"], global_pooling=1)]
    types = infer_types(model_of(operators, "p", inputs={"x": (None, 4, None, 9)}, w=normal(8, 4, 3, 3)))
    assert types["x"].shape == (None, 4, None, 9)
    assert types["c"].shape == (None, 8, None, 7)
    assert types["p"].shape == (None, 8, 1, 1)
    assert types["c"].meta is FLOAT32


def test_equal_unknown_sizes_broadcast_and_different_ones_do_not() -> None:
    operators = [
        op("Relu", ["x"], ["same"]),
        op("MaxPool", ["x"], ["less"], kernel=2, stride=2),
        op("ReduceSum", ["x"], ["each"], axes=[2, 3]),
        op("ReduceSum", ["x"], ["image"], axes=[0]),
    ]
    types = infer_types(model_of(operators, "same", inputs={"x": (None, 4, None, 8)}))
    assert types["same"].broadcasts_to(types["x"])
    assert types["each"].broadcasts_to(types["x"])
    assert types["image"].broadcasts_to(types["x"])
    assert not types["less"].broadcasts_to(types["x"])
    assert not types["x"].broadcasts_to(types["each"])


def test_a_size_that_values_decide_is_unknown_and_no_other_operators() -> None:
    operators = [
        op("NonZero", ["x"], ["places"]),
        op("NonZero", ["z"], ["others"]),
        op("Transpose", ["places"], ["rows"]),
        op("Add", ["rows", "rows"], ["twice"]),
        op("Add", ["places", "others"], ["y"]),
        op("Squeeze", ["places"], ["lone"], dims=[1]),
    ]
    types = infer_types(model_of(operators, inputs={"x": (5, 2), "z": (5, 2)}))
    assert types["places"].shape == types["others"].shape == (2, None)
    assert types["rows"].shape == types["twice"].shape == (None, 2)
    assert types["twice"].broadcasts_to(types["rows"])
    assert not types["others"].broadcasts_to(types["places"])
    assert {"y", "lone"}.isdisjoint(types)


def test_a_size_that_values_decide_is_known_where_they_are_constant() -> None:
    operators = [op("NonZero", ["c"], ["places"]), op("Gather", ["x", "places"], ["y"])]
    types = infer_types(model_of(operators, inputs={"x": (None, 3)}, c=np.array([0, 7, 0, 7, 7])))
    assert types["places"].shape == (1, 3)


def test_layers_behind_a_size_that_values_decide_are_fused() -> None:
    gelu = [
        op("Mul", ["f", "half_root"], ["a"]), op("Erf", ["a"], ["e"]), op("Add", ["e", "one"], ["p"]),
        op("Mul", ["f", "p"], ["q"]), op("Mul", ["q", "half"], ["y"]),
    ]  # fmt: skip
    operators = [
        op("NonZero", ["x"], ["places"]), op("Gather", ["table", "places"], ["rows"]),
        op("FC", ["rows", "w", "b"], ["f"], axis=2), *gelu,
    ]  # fmt: skip
    numbers = {"half_root": np.float32(0.5**0.5), "one": np.float32(1), "half": np.float32(0.5)}
    model = model_of(
        operators, inputs={"x": (9,)}, table=normal(9, 6), w=normal(4, 6), b=normal(4),
        **{name: np.asarray(value) for name, value in numbers.items()},
    )  # fmt: skip
    assert types_of(run_passes(model, SIMPLIFYING).model) == ["NonZero", "Gather", "FusedFC"]


def test_what_an_operator_refuses_in_some_probe_is_unknown_and_the_rest_known() -> None:
    operators = [op("Relu", ["x"], ["a"]), op("Reshape", ["a"], ["b"], shape=[1, 4, 36]), op("Tanh", ["b"], ["y"])]
    types = infer_types(model_of(operators, inputs={"x": (None, 4, 6, 6)}))
    assert types["a"].shape == (None, 4, 6, 6)
    assert "b" not in types
    assert "y" not in types


def test_free_axes_of_two_inputs_may_differ_where_operators_broadcast() -> None:
    sums = [op("Abs", ["x"], ["a"]), op("Abs", ["z"], ["b"]), op("Add", ["a", "b"], ["y"])]
    types = infer_types(model_of(sums, inputs={"x": (None, 4), "z": (None, 4)}))
    assert types["a"] == types["x"]
    assert types["a"] != types["b"]
    assert not types["a"].broadcasts_to(types["b"])
    assert not types["b"].broadcasts_to(types["a"])
    assert types["a"].broadcasts_to(types["y"])
    joined = [op("Concat", ["x", "z"], ["c", "sizes"], axis=1), op("Abs", ["c"], ["y"])]
    types = infer_types(model_of(joined, inputs={"x": (None, 4), "z": (None, 4)}))
    assert types["c"].shape == (None, 8)
    assert types["y"] == types["c"]


def test_shapes_behind_values_that_follow_from_shapes_are_known() -> None:
    operators = [
        op("Shape", ["x"], ["sizes"]),
        op("Gather", ["sizes", "first"], ["batch"]),
        op("Concat", ["batch", "rest"], ["target", "lengths"], axis=0),
        op("Reshape", ["x", "target"], ["y", "old"]),
        op("Flatten", ["x"], ["flat"]),
    ]
    constants = {"first": np.array([0]), "rest": np.array([-1, 3])}
    types = infer_types(model_of(operators, inputs={"x": (None, 6, None, None)}, **constants))
    assert types["y"].shape == (None, None, 3)
    assert all(3 * y[1] == flat[1] for y, flat in zip(types["y"].shapes, types["flat"].shapes, strict=True))


def test_what_agrees_at_multiples_of_8_alone_does_not_agree() -> None:
    operators = [
        op("Shape", ["x"], ["sizes"]),
        op("Div", ["sizes", "eight"], ["windows"]),
        op("Mul", ["windows", "eight"], ["covered"]),
        op("ConstantFill", ["covered"], ["y"], input_as_shape=1),
    ]
    types = infer_types(model_of(operators, inputs={"x": (8, 8, None)}, eight=np.array(8)))
    assert types["y"].shape == (8, 8, None)
    assert types["y"] != types["x"]


def test_an_input_of_unknown_shape_is_what_its_filter_reads() -> None:
    known = model_of([op("Conv", ["x", "w"], ["y"], kernel=3)], w=normal(8, 4, 3, 3))
    unknown = Model(known.name, known.net, None, known.parameters, {"x": InputInfo()}, known.outputs)
    assert infer_types(unknown)["y"].shape == (None, 8, None, None)
    grouped = Model(known.name, model_of([op("Abs", ["x"], ["y"])]).net, None, {}, {"x": InputInfo()}, ("y",))
    assert "y" not in infer_types(grouped)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_remembered_from_pass_to_pass_is_what_would_be_inferred_anew(dtype: str) -> None:
    operators = [
        op("Conv", ["x", "w"], ["a"], kernel=3, pad=1),
        op("Relu", ["a"], ["a"]),
        op("Conv", ["a", "v"], ["b"], kernel=1),
        op("Add", ["b", "a"], ["s"]),
        op("MaxPool", ["s"], ["p"], kernel=2, stride=2),
        op("Flatten", ["p"], ["f"]),
        op("Sigmoid", ["f"], ["f"]),
        op("Softmax", ["f"], ["y"]),
    ]
    model = model_of(operators, inputs={"x": (None, 8, 6, 6)}, w=normal(16, 8, 3, 3), v=normal(16, 16, 1, 1))
    draft = Draft(model)
    for step in with_precision((*SIMPLIFYING, ENGINE, layout_pass(NHWC), *FINISHING), dtype):
        draft.types()
        step.edit(draft)
        draft.settle(retyped=step.retypes, same_types=step.keeps_types)
        assert draft.types() == infer_types(draft.model), step.name


def test_an_operator_is_asked_once_for_all_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(definition: Node, *given: Any, **how: Any) -> list[Probed]:
        asked.append(definition.type)
        return probed_outputs(definition, *given, **how)

    monkeypatch.setattr(types_module, "probed_outputs", noted)
    layers = [op("FC", [f"x{n}" if n else "x", "w", "b"], [f"x{n + 1}"]) for n in range(20)]
    draft = Draft(model_of(layers, inputs={"x": (None, 6)}, w=normal(6, 6), b=normal(6)))
    assert draft.types()["x20"].shape == (None, 6)
    assert asked == ["FC"]


def test_after_an_edit_only_operators_with_new_outputs_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of([op("Abs", ["x"], ["a"]), op("Flatten", ["a"], ["b"]), op("Relu", ["b"], ["y"])])
    draft = Draft(model)
    draft.types()
    asked: list[str] = []

    def noted(known: KnownTypes, definition: Node, *given: Any) -> Sequence[Probed]:
        asked.append(definition.type)
        return outputs_of(known, definition, *given)

    outputs_of = KnownTypes._outputs_of
    monkeypatch.setattr(KnownTypes, "_outputs_of", noted)
    draft.replace(1, draft[1].changed(outputs=["c"]), new_node("Abs", ["c"], ["b"]))
    draft.changed("one more")
    draft.settle()
    assert draft.types() == infer_types(draft.model)
    assert asked[:1] == ["Flatten"]
    assert len(asked) == 1 + len(draft)
