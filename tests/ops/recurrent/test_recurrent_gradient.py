"""Gradients of LSTM and GRU against numerical ones, an LSTM built of units, and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.gradient import gradient
from dagexec.errors import ArgumentError, GradientError, OperatorError, ShapeError
from dagexec.ops.families.recurrent import layer_gradient
from dagexec.scheduler.nets.simple import SimpleNet
from tests.memory_limits import peak_memory
from tests.ops.gradient_checks import analytic_gradients, check_gradient
from tests.ops.recurrent_layers import DIRECTIONS, Layer
from tests.ops.running import Array, operator_def, run_operator, workspace_of

KINDS: list[dict[str, Any]] = [{"op_type": "LSTM"}, {"op_type": "GRU"}, {"op_type": "GRU", "linear": True}]
SMALL: dict[str, Any] = {"steps": 3, "batch": 2, "features": 3, "hidden": 2}


def check(layer: Layer, *, saves: bool = True, **options: Any) -> None:
    """Numerical gradients; `saves`: the layer saves what its gradient reads."""
    count = layer.results
    options.setdefault("weighted", range(count))
    check_gradient(
        layer.op_type,
        layer.inputs(np.float64),
        outputs=count + 2 * saves,
        statistics=range(count, count + 2),
        **options,
        **layer.arguments(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shorter", [None, (0, 2), (3, 1)])
@pytest.mark.parametrize("optional", [True, False])
def test_gradients_are_the_numerical_ones(
    kind: dict[str, Any], direction: str, shorter: tuple[int, ...] | None, optional: bool
) -> None:
    check(Layer(**kind, **SMALL, direction=direction, shorter=shorter, bias=optional, state=optional))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shorter", [None, (1, 2)])
def test_gradients_are_the_numerical_ones_block_by_block(
    kind: dict[str, Any], shorter: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_gradient, "BLOCK", 2 * 2 * 8)
    check(Layer(**kind, **SMALL | {"steps": 5}, direction="bidirectional", shorter=shorter))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_saved_nothing_is_computed_once_more(kind: dict[str, Any]) -> None:
    layer = Layer(**kind, **SMALL, direction="bidirectional", shorter=(0, 1))
    check(layer, saves=False)
    inputs = [f"x{index}" for index in range(len(layer.inputs()))]
    made = gradient(operator_def(layer.op_type, inputs, ["y"], **layer.arguments()), ["y_grad"])
    assert [one.type for one in made.operators] == [layer.op_type, f"{layer.op_type}Gradient"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [[0], [1]])
def test_outputs_without_a_gradient_count_as_zeros(kind: dict[str, Any], weighted: list[int]) -> None:
    check(Layer(**kind, **SMALL), weighted=weighted)


def test_only_the_gradient_of_the_last_cell() -> None:
    check(Layer(**SMALL, direction="reverse", shorter=(0, 1)), weighted=[2])


def saving_definition(layer: Layer) -> OperatorDef:
    inputs = [f"x{index}" for index in range(len(layer.inputs()))]
    outputs = [f"y{index}" for index in range(layer.results + 2)]
    return operator_def(layer.op_type, inputs, outputs, **layer.arguments())


@pytest.mark.parametrize(
    "sizes", [{"steps": 0}, {"batch": 0}, {"features": 0}, {"hidden": 0}, {"steps": 0, "shorter": (0,)}]
)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_go_through(kind: dict[str, Any], sizes: dict[str, Any]) -> None:
    layer = Layer(**kind, **(SMALL | sizes), direction="bidirectional")
    inputs = layer.inputs(np.float64)
    floats = [index for index, array in enumerate(inputs) if array.dtype == np.float64]
    last = np.ones((2, layer.batch, layer.hidden))
    found = analytic_gradients(saving_definition(layer), inputs, {1: last}, floats)
    for index in floats:
        assert found[index].shape == inputs[index].shape
        assert np.isfinite(found[index]).all()
    if layer.steps == 0:
        np.testing.assert_array_equal(found[floats[4]], last)
        np.testing.assert_array_equal(found[1], np.zeros_like(inputs[1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_stands_behind_the_end_of_a_sequence_reaches_no_gradient(kind: dict[str, Any], direction: str) -> None:
    layer = Layer(**kind, direction=direction, shorter=(0, 1, 4))
    inputs = layer.inputs(np.float64)
    shape = (layer.steps, layer.directions, layer.batch, layer.hidden)
    dy = np.random.default_rng(1).uniform(-1, 1, shape)
    floats = [index for index, array in enumerate(inputs) if array.dtype == np.float64]
    expected = analytic_gradients(saving_definition(layer), inputs, {0: dy}, floats)
    spoilt, spoilt_dy = inputs[0].copy(), dy.copy()
    for n, length in enumerate(layer.lengths):
        spoilt[length:, n] = np.nan
        spoilt_dy[length:, :, n] = np.nan
    found = analytic_gradients(saving_definition(layer), [spoilt, *inputs[1:]], {0: spoilt_dy}, floats)
    for index in floats:
        np.testing.assert_array_equal(found[index], expected[index])


def unrolled(layer: Layer) -> list[OperatorDef]:
    """An LSTM of one direction as an FC and an LSTMUnit for each step, with Caffe2's order of the gates."""
    made = []
    for step in range(layer.steps):
        before = ("h0", "c0") if step == 0 else (f"h{step}", f"c{step}")
        made += [
            operator_def("FC", [f"x{step}", "w", "b"], [f"gx{step}"]),
            operator_def("FC", [before[0], "r", "zero"], [f"gh{step}"], axis=2),
            operator_def("Add", [f"gh{step}", f"gx{step}"], [f"g{step}"], broadcast=1),
            operator_def("LSTMUnit", [*before, f"g{step}", "lengths", f"t{step}"], [f"h{step + 1}", f"c{step + 1}"]),
        ]
    return made


def test_an_lstm_is_its_units_one_after_another() -> None:
    layer = Layer(steps=5, shorter=(0, 2, 4), seed=7)
    x, w, r, b, lengths, h0, c0 = layer.inputs(np.float64)
    order = [0, 2, 1, 3]  # Caffe2's i, f, o, g of ONNX's i, o, f, g
    w, r, wb, rb = (
        array.reshape(4, layer.hidden, -1)[order].reshape(4 * layer.hidden, -1) for array in (w, r, *np.split(b[0], 2))
    )
    workspace = Workspace()
    feeds = {"w": w, "r": r, "b": (wb + rb)[:, 0], "zero": np.zeros(24), "h0": h0, "c0": c0, "lengths": lengths}
    feeds |= {f"x{step}": x[step] for step in range(5)} | {f"t{step}": np.array([step], np.int32) for step in range(5)}
    for name, array in feeds.items():
        workspace.feed_blob(name, array)
    with SimpleNet(NetDef(name="units", op=unrolled(layer)), workspace) as net:
        net.run()
    y, last_h, last_c = run_operator("LSTM", list(layer.inputs(np.float64)), 3, **layer.arguments())
    np.testing.assert_allclose(workspace.fetch_blob("h5"), last_h, rtol=1e-12)
    np.testing.assert_allclose(workspace.fetch_blob("c5"), last_c, rtol=1e-12)
    for step in range(5):
        running = (step < lengths)[:, None]
        np.testing.assert_allclose(y[step, 0], workspace.fetch_blob(f"h{step + 1}")[0] * running, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shorter", [None, (0, 20)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_second_run_allocates_no_tensor(kind: dict[str, Any], shorter: tuple[int, ...] | None, dtype: type) -> None:
    layer = Layer(**kind, steps=30, batch=32, features=32, hidden=48, direction="bidirectional", shorter=shorter)
    definition = saving_definition(layer)
    given: list[str | None] = [None] * len(definition.output)
    given[0] = "dy"
    workspace = workspace_of({"dy": np.ones((30, 2, 32, 48), dtype)})
    for name, array in zip(definition.input, layer.inputs(), strict=True):
        workspace.feed_blob(name, array if array.dtype == np.int32 else array.astype(dtype))
    made = gradient(definition, given)
    with SimpleNet(NetDef(name="n", op=[definition, *made.operators]), workspace) as net:
        net.run()
        peak = peak_memory(net.run)
    assert peak < 30_000, f"{peak} bytes; a gate of one step and direction has {32 * 48 * 4}"


def test_what_was_saved_has_no_gradient() -> None:
    definition = saving_definition(Layer())
    with pytest.raises(GradientError, match="'y3' is there for the gradient operator"):
        gradient(definition, ["y0_grad", None, None, "y3_grad", None])


def test_sequence_lengths_alone_ask_for_nothing() -> None:
    definition = saving_definition(Layer(shorter=(0,)))
    assert gradient(definition, ["d", None, None, None, None], wanted=[4]).operators == ()


def gradient_inputs(layer: Layer) -> list[Array]:
    found = run_operator(layer.op_type, list(layer.inputs()), layer.results + 2, **layer.arguments())
    return [*layer.inputs(), found[0], *found[layer.results :], found[0]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"given": [1, 0]}, ArgumentError, "'given' must be ascending numbers below 3"),
        ({"given": [3]}, ArgumentError, "'given' must be ascending numbers below 3"),
        ({"given": [0, 1]}, ShapeError, "expected 11 inputs, found 10"),
        ({"given": [1]}, ShapeError, r"must have shape \(1, 3, 6\) \(as the layer gives it\), found \(4, 1, 3, 6\)"),
        ({"wanted": [0, 9]}, ArgumentError, r"'wanted' must be ascending numbers of \[0, 1, 2, 3, 4, 5\]"),
        ({"wanted": [0]}, ShapeError, "expected 1 outputs"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(
    change: dict[str, ArgumentValue], error: type[Exception], message: str
) -> None:
    layer = Layer()
    with pytest.raises(error, match=message):
        run_operator("LSTMGradient", list(gradient_inputs(layer)), 6, **(layer.arguments() | change))


def test_a_length_that_grew_beyond_the_steps_is_an_error() -> None:
    layer = Layer("GRU", shorter=(0, 1))
    inputs = gradient_inputs(layer)
    inputs[4] = inputs[4] + 1
    with pytest.raises(OperatorError, match=r"sequence length must be in \[0, 4\], found 5"):
        run_operator("GRUGradient", list(inputs), 5, **layer.arguments())
