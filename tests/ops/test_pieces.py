"""Pieces of operators: threads may compute those of a phase in any order and side by side, and bytes stay the same."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from dagexec import Workspace
from dagexec.core import native
from dagexec.core.operator import Step
from dagexec.core.registry import create_operator
from tests.ops.onednn.engine import AVX2, has_vectors_of, needs_onednn, normal
from tests.ops.pieces import Row, cut_into, native_phases, rows_of_piece, run_rows, shuffled
from tests.ops.running import Array, operator_def

pytestmark = [needs_onednn, pytest.mark.skipif(not has_vectors_of(AVX2), reason="there are no kernels here")]

Case = tuple[str, list[tuple[int, ...]], dict[str, Any]]
"""An operator, the shapes of its inputs, and its arguments."""

IMAGES, LAST = (2, 32, 18, 20), (2, 18, 20, 32)

ONE = {"kernel": 1}

CASES: dict[str, Case] = {
    "function": ("Tanh", [(3, 1000)], {}),
    "sum of tensors": ("Add", [(4, 600), (4, 600)], {}),
    "product with a row": ("Mul", [(40, 64), (64,)], {"broadcast": 1}),
    "product with channels of one image": ("Mul", [(1, 32, 18, 20), (32,)], {"broadcast": 1, "axis": 1}),
    "chain": ("FusedElementwise", [(40, 64)], {"post_ops": ["linear:2:1", "sigmoid"]}),
    "softmax": ("Softmax", [(30, 70)], {}),
    "layer norm": ("LayerNorm", [(30, 64)], {}),
    "layer norm of a square": ("LayerNorm", [(64, 64), (64,), (64,)], {"elementwise_affine": 1}),
    "instance norm": ("InstanceNorm", [IMAGES, (32,), (32,)], {}),
    "norm of one group": ("GroupNorm", [(2, 32, 36, 40), (32,), (32,)], {"group": 1}),
    "layer norm of images": ("LayerNorm", [(2, 32, 36, 40), (32, 36, 40), (32, 36, 40)], {"elementwise_affine": 1}),
    "root mean square norm": ("RootMeanSquareNorm", [(30, 64), (64,)], {}),
    "batch norm": ("SpatialBN", [IMAGES, (32,), (32,), (32,), (32,)], {"is_test": 1}),
    "batch norm of one image": ("SpatialBN", [(1, 32, 18, 20), (32,), (32,), (32,), (32,)], {"is_test": 1}),
    "batch norm, channels last": ("SpatialBN", [LAST, (32,), (32,), (32,), (32,)], {"is_test": 1, "order": "NHWC"}),
    "local response norm": ("LRN", [IMAGES], {"size": 5, "alpha": 0.1, "beta": 0.75}),
    "local response norm, channels last": ("LRN", [LAST], {"size": 5, "alpha": 0.1, "beta": 0.75, "order": "NHWC"}),
    "max pool": ("MaxPool", [IMAGES], {"kernel": 3, "stride": 2, "pad": 1}),
    "max pool of one image": ("MaxPool", [(1, 32, 18, 20)], {"kernel": 3, "stride": 2, "pad": 1}),
    "average pool, channels last": ("AveragePool", [LAST], {"kernel": 3, "stride": 1, "pad": 1, "order": "NHWC"}),
    "max pool of one image, channels last": ("MaxPool", [(1, *LAST[1:])], {"kernel": 3, "stride": 2, "order": "NHWC"}),
    "reduction": ("ReduceSum", [(640, 90)], {"axes": [1]}),
    "transpose": ("Transpose", [(6, 40, 50)], {"axes": [0, 2, 1]}),
    "concat": ("Concat", [(5, 40, 8), (5, 24, 8)], {"axis": 1}),
    "split": ("Split", [(5, 40, 8)], {"axis": 1}),
    "cast": ("Cast", [(1000,)], {"to": "bfloat16"}),
    "reorder": ("Reorder", [IMAGES], {"from_order": "NCHW", "to_order": "NHWC"}),
    "resize": ("Resize", [(3, 8, 10, 12)], {"mode": "linear", "scales": [1.0, 1.0, 2.0, 2.0]}),
    "depthwise": ("Conv", [(2, 12, 12, 40), (40, 3, 3, 1)], {"kernel": 3, "group": 40, "order": "NHWC", "no_bias": 1}),
    "depthwise, few channels": ("Conv", [(1, 3, 9, 40), (40, 3, 3, 1)], {"kernel": 3, "group": 40, "order": "NHWC"}),
    "pointwise": ("Conv", [(2, 9, 9, 64), (48, 1, 1, 64)], {"kernel": 1, "order": "NHWC"}),
    "convolution": ("Conv", [(2, 40, 40, 32), (64, 3, 3, 32)], {"kernel": 3, "pad": 1, "order": "NHWC"}),
    "tiles": ("Conv", [(1, 14, 14, 64), (64, 3, 3, 64)], {"kernel": 3, "pad": 1, "order": "NHWC"}),
    "tiles of many blocks": ("Conv", [(4, 60, 60, 64), (64, 3, 3, 64)], {"kernel": 3, "pad": 1, "order": "NHWC"}),
    "bounded layer": ("FusedConv", [(1, 14, 14, 64), (64, 1, 1, 64)], {"order": "NHWC", "post_ops": ["relu"], **ONE}),
    "rows of taps": ("ConvTranspose", [(2, 6, 7, 32), (32, 2, 2, 16)], {"kernel": 2, "stride": 2, "order": "NHWC"}),
    "layer": ("FC", [(5, 256), (512, 256), (512,)], {}),
    "product": ("MatMul", [(33, 64), (64, 300)], {}),
    "product of one row": ("MatMul", [(1, 64), (64, 300)], {}),
    "products of stacks": ("BatchMatMul", [(4, 12, 64), (4, 64, 20)], {}),
    "attention": ("FusedAttention", [(1, 3, 70, 16)] * 3, {}),
    "recurrent layer": ("LSTM", [(4, 6, 32), (1, 256, 32), (1, 256, 64)], {"hidden_size": 64}),
}  # fmt: skip


WITH_EXAMPLES = [name for name in CASES if name != "recurrent layer"]
"""Those whose first axis is that of examples; an LSTM's is time."""

CUT_BY_EXAMPLE = {
    "convolution": ("Conv", [(1, 14, 14, 32), (64, 5, 5, 32)], {"kernel": 5, "pad": 2, "order": "NHWC"}),
    "strides": ("Conv", [(1, 25, 25, 32), (64, 3, 3, 32)], {"kernel": 3, "stride": 2, "order": "NHWC"}),
    "layer of one tap": ("Conv", [(1, 14, 14, 64), (68, 1, 1, 64)], {"kernel": 1, "order": "NHWC"}),
    "attention": CASES["attention"],
}  # fmt: skip


def prepared(case: Case, pieces: int, examples: int = 0) -> tuple[Step, list[Array], Workspace]:
    """The step, and its outputs; of so many examples, if that is not 0, of which the first is always the same."""
    op_type, shapes, arguments = case
    workspace, names = Workspace(), [f"x{number}" for number in range(len(shapes))]
    for number, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        array = np.abs(normal(number, *shape))
        if examples and len(shape) == len(shapes[0]) and shape[0] == shapes[0][0]:
            array = np.concatenate([array[:1], *(array[:1] + place for place in range(1, examples))])
        workspace.feed_blob(name, array)
        if number and op_type not in ("BatchMatMul", "FusedAttention"):
            workspace.get_blob(name).tensor().freeze()
    results = ["y0", "y1"] if op_type == "Split" else ["y0"]
    definition = operator_def(op_type, names, results, **arguments, engine="ONEDNN")
    operator = create_operator(definition, workspace)
    with cut_into(pieces):
        step = operator.bind(operator.infer())
    return step.step, [workspace.get_blob(name).tensor().array for name in results], workspace


@pytest.mark.parametrize("name", CASES)
def test_pieces_side_by_side_give_the_bytes_of_the_step(name: str) -> None:
    step, outputs, _workspace = prepared(CASES[name], 6)
    phases = native_phases(step)
    assert any(len(phase) > 1 for phase in phases), [len(phase) for phase in phases]
    step()
    expected = [output.tobytes() for output in outputs]
    for seed in range(3):
        random = Random(seed)
        for output in outputs:
            output.view(np.uint8)[...] = 0x55
        for phase in phases:
            run_rows(shuffled(phase, random))
        assert [output.tobytes() for output in outputs] == expected


@pytest.mark.parametrize("name", CASES)
def test_pieces_of_a_phase_write_to_places_of_their_own(name: str) -> None:
    step, outputs, _workspace = prepared(CASES[name], 6)
    step()
    whole = [np.zeros(output.nbytes, bool) for output in outputs]
    for phase in native_phases(step):
        taken = [np.zeros(output.nbytes, bool) for output in outputs]
        for piece in phase:
            for mine, written in zip(taken, written_by(piece, outputs), strict=True):
                assert not (mine & written).any()
                mine |= written
        for all_of_it, mine in zip(whole, taken, strict=True):
            all_of_it |= mine
    assert all(written.all() for written in whole)


def written_by(piece: Any, outputs: list[Array]) -> list[np.ndarray[Any, np.dtype[np.bool_]]]:
    """Which bytes of the outputs a piece writes."""
    found = [np.zeros(output.nbytes, bool) for output in outputs]
    for value in (0x55, 0x33):
        for output in outputs:
            output.view(np.uint8)[...] = value
        run_rows(rows_of_piece(piece))
        for written, output in zip(found, outputs, strict=True):
            written |= output.view(np.uint8).reshape(-1) != value
    return found


@pytest.mark.parametrize("seconds", [2e-6, 1e-7])
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_an_example_has_the_same_bytes_however_its_batch_is_cut(
    name: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of so little work that those of a batch are others, or more, than those of the first example."""
    monkeypatch.setattr(native, "PIECE_SECONDS", seconds)
    firsts = []
    for examples in (1, 2, 5):
        step, outputs, _workspace = prepared(CASES[name], 0, examples)
        step()
        firsts.append([output[0].tobytes() for output in outputs])
    assert firsts[1:] == [firsts[0]] * 2


@pytest.mark.parametrize("seconds", [2e-6, 5e-7])
@pytest.mark.parametrize("name", CUT_BY_EXAMPLE)
def test_how_an_example_is_cut_follows_from_its_own_geometry(
    name: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls write the same places of it in any batch, where bytes may depend on what is computed in one call."""
    monkeypatch.setattr(native, "PIECE_SECONDS", seconds)
    places = []
    for examples in (1, 2, 5):
        step, [output], _workspace = prepared(CUT_BY_EXAMPLE[name], 0, examples)
        step()
        rows = [row for piece in native_phases(step)[-1] for row in rows_of_piece(piece)]
        places.append({place for row in rows if any(place := written_in_first(row, output))})
    assert len(places[0]) > 2
    assert places[1:] == [places[0]] * 2


def written_in_first(row: Row, output: Array) -> bytes:
    """Which bytes of the first example a call writes."""
    output.view(np.uint8)[...] = 0x55
    run_rows([row])
    other: bytes = np.packbits(output[0].view(np.uint8) != 0x55).tobytes()
    return other
