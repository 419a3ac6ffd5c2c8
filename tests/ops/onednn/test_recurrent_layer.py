"""Recurrent layers on kernels of our own: values, and bytes that depend neither on pieces, nor batch, nor lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dagexec.core.arguments import ArgumentValue
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.engines.onednn.recurrent_tables import along
from tests.ops.onednn.engine import run_onednn
from tests.ops.recurrent_layers import Layer
from tests.ops.running import Array, run_operator

_found = library()
pytestmark = pytest.mark.skipif(_found is None or not _found.machine.can_run, reason="no kernels run here")

KINDS = [Layer("LSTM"), Layer("GRU"), Layer("GRU", linear=True)]
VARIANTS: list[tuple[str, dict[str, ArgumentValue]]] = [
    ("RNN", {}),
    ("RNN", {"activations": ["Relu", "tanh"], "clip": 0.3}),
    ("GeneralLSTM", {"peepholes": 1, "clip": 0.5}),
    ("GeneralLSTM", {"input_forget": 1, "activations": ["Tanh", "Sigmoid", "Relu"] * 2}),
    ("GeneralGRU", {"activations": ["Tanh", "Relu", "Sigmoid", "Tanh"]}),
    ("GeneralGRU", {"linear_before_reset": 1, "clip": 0.2}),
]


def run(layer: Layer, pieces: int = 1, inputs: list[Array] | None = None) -> list[Array]:
    """The results by the kernels."""
    given = layer.inputs() if inputs is None else inputs
    return run_onednn(layer.op_type, list(given), layer.results, pieces=pieces, **layer.arguments())


def same(one: list[Array], other: list[Array]) -> bool:
    return [array.tobytes() for array in one] == [array.tobytes() for array in other]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shorter", [None, (1, 0, 3)])
@pytest.mark.parametrize("hidden", [7, 48])
def test_layers_are_right(kind: Layer, shorter: tuple[int, ...] | None, hidden: int) -> None:
    layer = replace(kind, steps=6, batch=7, features=13, hidden=hidden, direction="bidirectional", shorter=shorter)
    for one, other in zip(run(layer, pieces=2), layer.expected(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("op_type", "arguments"), VARIANTS)
def test_variants_are_as_the_default_engine_has_them(op_type: str, arguments: dict[str, ArgumentValue]) -> None:
    rng, gates, states = np.random.default_rng(3), {"R": 1, "L": 4, "G": 3}[op_type.removeprefix("General")[0]], 1
    states += op_type == "GeneralLSTM"
    shapes = [(5, 3, 9), (2, gates * 21, 9), (2, gates * 21, 21), (2, 2 * gates * 21)]
    shapes += [(2, 3 * 21)] if "peepholes" in arguments else []
    inputs = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
    chosen = arguments | {"direction": "bidirectional", "bias": 1}
    found = run_onednn(op_type, list(inputs), 1 + states, **chosen)
    for one, other in zip(found, run_operator(op_type, list(inputs), 1 + states, **chosen), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "direction"), [(1, "reverse"), (5, "forward"), (2, "bidirectional")])
def test_pieces_change_no_byte(kind: Layer, batch: int, direction: str) -> None:
    """They share directions, then rows, or of one row units, where they wait for each other."""
    layer = replace(kind, steps=5, batch=batch, features=20, hidden=200, direction=direction)
    inputs = layer.inputs()
    inputs[2] /= 8  # with larger weights small errors grow from step to step, and engines differ
    alone = run(layer, inputs=inputs)
    for pieces in (2, 3, 8):
        assert same(run(layer, pieces, inputs), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_has_the_same_bytes_in_every_batch(kind: Layer) -> None:
    """Whatever its neighbors are and how long they are, even if they hold NaN."""
    layer = replace(kind, steps=6, batch=9, features=10, hidden=20, shorter=(0, 2, 5))
    inputs = layer.inputs()
    inputs[0][:, 1] = np.nan
    whole = run(layer, inputs=inputs)
    assert np.isnan(whole[0][0, 0, 1]).all()
    for n in (0, 2, 8):
        of_one = replace(layer, batch=1, shorter=(layer.shorter[n % 3],) if layer.shorter else None)
        x, w, r, b, lengths, *states = inputs
        alone = run(of_one, inputs=[x[:, [n]], w, r, b, lengths[[n]], *(state[:, [n]] for state in states)])
        assert same(alone, [whole[0][:, :, [n]], *(state[:, [n]] for state in whole[1:])])


def test_what_is_saved_for_the_gradient() -> None:
    """As the default engine has it, of a layer whose gates do not fill vectors."""
    for kind in KINDS:
        layer = replace(kind, hidden=11, direction="bidirectional")
        wanted = layer.results + 2
        found = run_onednn(layer.op_type, list(layer.inputs()), wanted, **layer.arguments())
        for one, other in zip(
            found, run_operator(layer.op_type, list(layer.inputs()), wanted, **layer.arguments()), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9])
def test_numbers_of_steps_grow_between_the_first_and_the_last(steps: int) -> None:
    def make(step: int) -> list[int]:
        return [100, 0] if step == 0 else [7, 7] if step == steps - 1 else [5 + 3 * step, 1]

    assert along(make, steps).tolist() == [make(step) for step in range(steps)]
