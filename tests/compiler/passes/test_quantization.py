"""precision for int8: by calibration."""

from __future__ import annotations

import numpy as np
import pytest

import dagexec
from dagexec.binding.parameters import initialized
from dagexec.compiler.passes import Rewritten, run_passes
from dagexec.compiler.passes.catalog import SIMPLIFYING
from dagexec.compiler.passes.low_precision import PRECISION_PASSES, before_precision, with_precision
from dagexec.compiler.passes.quantization import errors_by_layer, with_quantization
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from dagexec.errors import FeedError
from dagexec.zoo import build
from tests.compiler.passes.models import feeds_for, listed, model_of, normal, op, outputs_of, types_of

CONV_1 = op("Conv", ["x", "w1", "b1"], ["c1"], kernel=3, pad=1)
CONV_2 = op("Conv", ["h", "w2", "b2"], ["y"], kernel=3, pad=1)
RANDOM = np.random.default_rng(5)  # of its own, so that no other module's numbers come before
WEIGHTS = {
    name: RANDOM.standard_normal(shape).astype(np.float32)
    for name, shape in (("w1", (8, 4, 3, 3)), ("b1", 8), ("w2", (4, 8, 3, 3)), ("b2", 4))
}


def quantized(model: Model, samples: int = 4) -> Rewritten:
    """What the pass makes of a model, calibrated on random inputs."""
    passes = with_precision((), "int8", [feeds_for(model, 50 + number) for number in range(samples)])
    [precision] = [one for one in passes if one.name == "precision"]
    return precision.apply(model)


def error(model: Model, other: Model) -> float:
    """Relative rms error of the outputs of `other`, over inputs that were not calibrated with."""
    found = []
    for seed in range(3):
        wanted, got = (outputs_of(which, feeds_for(model, seed)) for which in (model, other))
        found += [np.linalg.norm(got[name] - wanted[name]) / np.linalg.norm(wanted[name]) for name in wanted]
    return float(max(found))


def test_a_chain_of_convolutions_stays_on_integers() -> None:
    model = model_of([CONV_1, op("Relu", ["c1"], ["r"]), op("MaxPool", ["r"], ["h"], kernel=2), CONV_2], **WEIGHTS)
    result = quantized(model)
    assert types_of(result.model) == ["QuantizeLinear", "QuantConv", "MaxPool", "QuantConv"]
    assert error(model, result.model) < 0.03
    assert "'x' in 8 bits" in " ".join(result.changes)


def test_what_is_concatenated_or_added_stays_on_integers() -> None:
    operators = [
        CONV_1, op("Relu", ["c1"], ["r"]), op("Conv", ["r", "w3"], ["c3"], kernel=1), op("Relu", ["c3"], ["r3"]),
        op("Add", ["r", "r3"], ["s"]), op("Concat", ["s", "r"], ["h"], axis=1),
        op("Conv", ["h", "w4"], ["y"], kernel=1),
    ]  # fmt: skip
    model = model_of(operators, **WEIGHTS, w3=normal(8, 8, 1, 1), w4=normal(4, 16, 1, 1))
    result = quantized(model)
    # r has one scale for what reads it and for the concatenation; the later layer adds it
    assert types_of(result.model) == ["QuantizeLinear", "QuantConv", "QuantConv", "Concat", "QuantConv"]
    assert error(model, result.model) < 0.03


def test_a_relu_behind_a_concatenation_is_done_on_integers() -> None:
    operators = [
        CONV_1, op("AveragePool", ["c1"], ["p"], kernel=3, pad=1), op("Concat", ["c1", "p"], ["s"], axis=1),
        op("Relu", ["s"], ["h"]), op("Conv", ["h", "w4"], ["y"], kernel=1),
    ]  # fmt: skip
    model = model_of(operators, **WEIGHTS, w4=normal(4, 16, 1, 1))
    result = quantized(model)
    assert types_of(result.model)[-4:] == ["QuantizeLinear", "Concat", "Clip", "QuantConv"]
    assert error(model, result.model) < 0.03


def test_the_shortcut_of_a_residual_block_is_quantized_too() -> None:
    operators = [
        op("Conv", ["x", "w1"], ["a"], kernel=1), op("Conv", ["x", "w2"], ["b"], kernel=1),
        op("Add", ["a", "b"], ["s"]), op("Relu", ["s"], ["h"]), op("Conv", ["h", "w3"], ["y"], kernel=1),
    ]  # fmt: skip
    model = model_of(operators, w1=normal(4, 4, 1, 1), w2=normal(4, 4, 1, 1), w3=normal(4, 4, 1, 1))
    result = quantized(model)
    assert types_of(result.model) == ["QuantizeLinear", "QuantConv", "QuantConv", "QuantConv"]
    added = result.model.net.op[2]
    assert added.input[0] == "x/uint8"
    assert added.input[-1] == "a/uint8"


def test_a_layer_that_loses_too_much_stays_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = normal(4, 8, 3, 3)
    weights[:, 0] *= 1e-5  # the channel that has all the large values
    first = {**WEIGHTS, "w1": WEIGHTS["w1"].copy()}
    first["w1"][0] *= 1e5
    model = model_of([CONV_1, op("Relu", ["c1"], ["h"]), CONV_2], **{**first, "w2": weights})
    result = quantized(model)
    assert any(change.startswith("Conv 'y': stays in float32, 8 bits alone lose") for change in result.changes)
    assert listed(result.model)[-1].startswith("Conv h w2 b2 -> y")
    assert error(model, result.model) < 0.05
    feeds = [feeds_for(model, seed) for seed in range(2)]
    monkeypatch.setattr("dagexec.compiler.passes.quantization.LARGEST_ERROR", np.inf)
    all_of_it = with_quantization(model, feeds)
    assert error(model, all_of_it.model) > 0.1


def test_layers_that_are_not_convolutions_of_constants_stay() -> None:
    operators = [op("Conv", ["x", "w"], ["y"], kernel=1)]
    model = model_of(operators, inputs={"x": (1, 4, 5, 5), "w": (2, 4, 1, 1)})
    assert quantized(model).model is model
    waits = OperatorDef()
    waits.CopyFrom(CONV_2)
    waits.input[0] = "x"
    waits.control_input.append("x")
    model = model_of([waits], w2=normal(4, 4, 3, 3), b2=normal(4))
    assert quantized(model).model is model


def test_outputs_and_blobs_that_others_read_keep_their_values() -> None:
    operators = [CONV_1, op("Relu", ["c1"], ["h"]), CONV_2, op("Sigmoid", ["h"], ["z"])]
    model = model_of(operators, ("y", "h", "z"), **WEIGHTS)
    result = quantized(model)
    assert result.model.outputs == ("y", "h", "z")
    assert error(model, result.model) < 0.03


def test_no_samples_and_no_quantization_in_the_model_is_an_error() -> None:
    model = model_of([CONV_1], "c1", **WEIGHTS)
    with pytest.raises(FeedError, match=r"int8 needs sample inputs to calibrate with \(calibration=\)"):
        quantized(model, samples=0)
    with pytest.raises(ValueError, match="dtype is one of float32, bfloat16, float16, int8, not 'int4'"):
        with_precision((), "int4")


def test_the_passes_stand_where_they_see_constants_and_single_layers() -> None:
    names = [one.name for one in with_precision(SIMPLIFYING, "int8", [{}])]
    assert names.index("quantized-operators") == names.index("constant-folding") - 1
    assert names.index("precision") == names.index("convolution-sums") - 1
    assert [one.name for one in before_precision(SIMPLIFYING)][-1] == names[names.index("precision") - 1]
    assert with_precision(SIMPLIFYING, "float32") == SIMPLIFYING
    assert {one.name for one in PRECISION_PASSES} == set(names) - {one.name for one in SIMPLIFYING}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("lenet", 0.05), ("squeezenet", 0.05)])
def test_networks_of_the_zoo_keep_their_first_choice(name: str, most: float) -> None:
    model = initialized(build(name))
    samples = [feeds_for(model, 90 + number) for number in range(2)]
    result = run_passes(model, with_precision(SIMPLIFYING, "int8", samples)).model
    assert not {"Conv", "FC", "FusedConv", "FusedFC"} & set(types_of(result))
    feeds = feeds_for(model, 1)
    with dagexec.compile(model, optimize=False) as plain, dagexec.compile(result, tuning_seconds=0) as narrow:
        wanted, found = (next(iter(executor.run(feeds).values())) for executor in (plain, narrow))
    assert wanted.argmax() == found.argmax()
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < most


def test_errors_by_layer_name_the_layer_that_loses_most() -> None:
    model = model_of([CONV_1, op("Relu", ["c1"], ["h"]), CONV_2], **WEIGHTS)
    feeds = [feeds_for(model, seed) for seed in range(2)]
    found = {layer.output: layer.error for layer in errors_by_layer(model, "int8", feeds, feeds)}
    assert found.keys() == {"c1", "y"}
    assert all(1e-4 < value < 0.03 for value in found.values())
    narrow = {layer.output: layer.error for layer in errors_by_layer(model, "bfloat16", feeds, ())}
    assert all(1e-4 < value < 2.0**-8 for value in narrow.values())
