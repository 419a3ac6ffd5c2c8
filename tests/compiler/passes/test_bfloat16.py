"""precision for bfloat16."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dagexec.binding.parameters import initialized
from dagexec.compiler.passes import run_passes
from dagexec.compiler.passes.bfloat16 import PASS
from dagexec.compiler.passes.catalog import SIMPLIFYING
from dagexec.compiler.passes.low_precision import with_precision
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from dagexec.zoo import build
from tests.compiler.passes.models import feeds_for, listed, model_of, normal, op, outputs_of, types_of

WEIGHTS = {"w": normal(4, 4, 3, 3), "b": normal(4)}
CONV = op("Conv", ["x", "w", "b"], ["c"], kernel=3, pad=1)


def narrowed(model: Model, most: float = 0.01) -> list[str]:
    """What the pass leaves; outputs are float32 and within the rounding of bfloat16."""
    result = PASS.apply(model)
    wanted, found = (outputs_of(which, feeds_for(model)) for which in (model, result.model))
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        assert np.linalg.norm(found[name] - array) <= most * np.linalg.norm(array)
        assert not np.array_equal(found[name], array) or not result.changes
    return listed(result.model)


def test_casts_stand_where_bfloat16_begins_and_ends() -> None:
    operators = [CONV, op("Relu", ["c"], ["r"]), op("MaxPool", ["r"], ["p"], kernel=2), op("Softmax", ["p"], ["y"])]
    model = model_of(operators, **WEIGHTS)
    assert narrowed(model, 0.05) == [
        "Cast x -> x/bfloat16", "Conv x/bfloat16 w/bfloat16 b/bfloat16 -> c", "Relu c -> r", "MaxPool r -> p",
        "Cast p -> p/float32", "Softmax p/float32 -> y",
    ]  # fmt: skip
    assert PASS.apply(model).model.parameters["w/bfloat16"].dtype == ml_dtypes.bfloat16


def test_results_are_float32_and_casts_are_shared() -> None:
    operators = [CONV, op("Conv", ["x", "w"], ["d"], kernel=3, pad=1), op("Add", ["c", "d"], ["y"])]
    assert narrowed(model_of(operators, ("y", "c"), **WEIGHTS)) == [
        "Cast x -> x/bfloat16",
        "Conv x/bfloat16 w/bfloat16 b/bfloat16 -> c/bfloat16",
        "Cast c/bfloat16 -> c",
        "Conv x/bfloat16 w/bfloat16 -> d",
        "Add c/bfloat16 d -> y/bfloat16",
        "Cast y/bfloat16 -> y",
    ]


def test_sums_of_both_kinds_are_in_bfloat16() -> None:
    operators = [
        CONV, op("Add", ["c", "x"], ["s"]), op("Mul", ["s", "k"], ["m"]), op("Concat", ["m", "c"], ["y"], axis=1),
    ]  # fmt: skip
    model = model_of(operators, **WEIGHTS, k=normal(4, 1, 1))
    assert narrowed(model) == [
        "Cast x -> x/bfloat16", "Conv x/bfloat16 w/bfloat16 b/bfloat16 -> c", "Add c x/bfloat16 -> s",
        "Mul s k/bfloat16 -> m", "Concat m c -> y/bfloat16", "Cast y/bfloat16 -> y",
    ]  # fmt: skip


def test_what_is_joined_to_float32_stays_in_it() -> None:
    """As the keys of a decoder: those of the past would be cast in every run to be joined to the new ones."""
    operators = [op("FC", ["x", "w", "b"], ["new"]), op("Concat", ["past", "new"], ["y"], axis=0)]
    model = model_of(operators, inputs={"x": (1, 8), "past": (50, 4)}, w=normal(4, 8), b=normal(4))
    assert narrowed(model) == [
        "Cast x -> x/bfloat16", "FC x/bfloat16 w/bfloat16 b/bfloat16 -> new",
        "Cast new -> new/float32", "Concat past new/float32 -> y",
    ]  # fmt: skip


def test_what_waits_or_is_no_float32_stays() -> None:
    waits = OperatorDef()
    waits.CopyFrom(CONV)
    waits.control_input.append("x")
    assert PASS.apply(model_of([waits], "c", **WEIGHTS)).changes == ()
    doubles = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
    assert PASS.apply(model_of([op("Relu", ["x"], ["y"])], **doubles)).changes == ()


def test_readers_that_may_not_be_touched_get_float32() -> None:
    reads = op("Relu", ["c"], ["y"])
    reads.control_input.append("x")
    convolution = op("Conv", ["z", "w", "b"], ["c"], kernel=3)
    model = model_of([convolution, reads], inputs={"z": (1, 4, 5, 5), "x": (1,)}, **WEIGHTS)
    assert narrowed(model)[-2:] == ["Cast c/bfloat16 -> c", "Relu c -> y"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet", "squeezenet"])
def test_networks_of_the_zoo_lose_what_rounding_loses(name: str) -> None:
    model = initialized(build(name))
    result = run_passes(model, with_precision(SIMPLIFYING, "bfloat16")).model
    assert types_of(result).count("Cast") == 2
    wanted, found = (outputs_of(which, feeds_for(model), runs=1)["softmax"] for which in (model, result))
    assert wanted.argmax() == found.argmax()
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.03


def test_float16_is_narrowed_in_the_same_way_and_layers_are_fused_in_it() -> None:
    model = build("lenet")
    result = run_passes(initialized(model), with_precision(SIMPLIFYING, "float16"))
    net, parameters = result.model.net, result.model.parameters
    read = {parameters[name].dtype for definition in net.op for name in definition.input if name in parameters}
    assert read == {np.dtype(np.float16)}
    assert "FusedFC" in {definition.type for definition in net.op}
    wanted, found = (outputs_of(which, feeds_for(model)) for which in (initialized(model), result.model))
    for name, array in wanted.items():
        assert np.abs(found[name] - array).max() < 2e-3
