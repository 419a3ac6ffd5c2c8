"""Steps of native calls pointed at a caller's arrays: they read and write there, and nowhere else, and can go back."""

from __future__ import annotations

import math

import numpy as np
import pytest

import dagexec
from dagexec import NetDef
from dagexec.core import dtypes
from dagexec.core.arguments import ArgumentValue
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Prepared
from dagexec.core.registry import create_operator
from dagexec.core.workspace import Workspace
from tests.ops.kernels.running import needs_kernels
from tests.ops.onednn.engine import normal
from tests.ops.pieces import cut_into
from tests.ops.running import Array, operator_def, workspace_of

pytestmark = needs_kernels

HEADS = (1, 4, 40, 16)
CASES: dict[str, tuple[str, list[tuple[int, ...]], int, dict[str, ArgumentValue]]] = {
    "concat": ("Concat", [HEADS, (1, 4, 1, 16)], 1, {"axis": 2}),
    "transpose": ("Transpose", [HEADS], 1, {"axes": [0, 2, 1, 3]}),
    "reorder": ("Reorder", [(1, 250, 37)], 1, {"from_order": "NHWC"}),
    "split": ("Split", [(40, 24)], 2, {"axis": 1}),
    "attention": ("FusedAttention", [(1, 8, 3, 16), HEADS, HEADS], 1, {"scale": 0.25}),
}


def drawn(shapes: list[tuple[int, ...]], seed: int) -> list[Array]:
    return [normal(seed + number, *shape) for number, shape in enumerate(shapes)]


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_step_works_on_other_arrays_and_on_its_own_again(name: str, pieces: int) -> None:
    op_type, shapes, outputs, arguments = CASES[name]
    names, results = [f"x{n}" for n in range(len(shapes))], [f"y{n}" for n in range(outputs)]
    definition = operator_def(op_type, names, results, **arguments, engine="ONEDNN")

    def prepared_for(arrays: list[Array]) -> tuple[Workspace, Prepared]:
        workspace = workspace_of(zip(names, arrays, strict=True))
        op = create_operator(definition, workspace)
        with cut_into(pieces):
            return workspace, op.bind(op.infer())

    own, other = drawn(shapes, 1), drawn(shapes, 11)
    workspace, prepared = prepared_for(own)
    prepared.step()
    first = [workspace.fetch_blob(blob) for blob in results]
    elsewhere, there = prepared_for(other)
    there.step()
    wanted = [elsewhere.fetch_blob(blob) for blob in results]
    assert set(prepared.input_rebinds) == set(range(len(shapes)))
    targets = [np.full_like(one, np.nan) for one in wanted]
    for index, array in enumerate(other):
        prepared.input_rebinds[index](array)
    for index, array in enumerate(targets):
        prepared.output_rebinds[index](array)
    prepared.step()
    for blob, target, expected, before in zip(results, targets, wanted, first, strict=True):
        np.testing.assert_array_equal(target, expected)
        np.testing.assert_array_equal(workspace.fetch_blob(blob), before)
    for rebinds, blobs in ((prepared.input_rebinds, names), (prepared.output_rebinds, results)):
        for index, rebind in rebinds.items():
            rebind(workspace.get_blob(blobs[index]).value.array)
    for target in targets:
        target[:] = np.nan
    prepared.step()
    for blob, target, before in zip(results, targets, first, strict=True):
        np.testing.assert_array_equal(workspace.fetch_blob(blob), before)
        assert np.isnan(target).all()


def test_one_input_given_twice_is_moved_for_both() -> None:
    definition = operator_def("FusedAttention", ["q", "kv", "kv"], ["y"], engine="ONEDNN")
    workspace = Workspace()
    queries, own, other = normal(1, 1, 2, 3, 8), normal(2, 1, 2, 9, 8), normal(3, 1, 2, 9, 8)
    workspace.feed_blob("q", queries)
    workspace.feed_blob("kv", own)
    op = create_operator(definition, workspace)
    prepared = op.bind(op.infer())
    for index in (1, 2):
        prepared.input_rebinds[index](other)
    prepared.step()
    np.testing.assert_allclose(workspace.fetch_blob("y"), attention(queries, other, other, 1.0), atol=1e-5)


def attention(q: Array, k: Array, v: Array, scale: float) -> Array:
    """By the formula, in float64."""
    scores = q.astype(np.float64) @ k.swapaxes(-1, -2) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v  # type: ignore[no-any-return]


def test_a_decoders_loop_reads_and_writes_its_keys_and_values_in_the_callers_arrays() -> None:
    heads, past, width = 4, 192, 16
    scale = 1 / math.sqrt(width)
    net = NetDef(
        name="step",
        op=[
            operator_def("Concat", ["past_k", "k"], ["present_k"], axis=2),
            operator_def("Concat", ["past_v", "v"], ["present_v"], axis=2),
            operator_def("FusedAttention", ["q", "present_k", "present_v"], ["y"], scale=scale),
        ],
    )
    names = ("q", "k", "v", "past_k", "past_v")
    inputs = dict.fromkeys(names, InputInfo(dtypes.FLOAT32))
    model = Model("step", net, inputs=inputs, outputs=("y", "present_k", "present_v"))
    caches = {name: normal(seed, 1, heads, past, width) for seed, name in enumerate(("past_k", "past_v"))}
    keys, values = caches["past_k"], caches["past_v"]
    with dagexec.compile(model, num_workers=1) as executor:
        for step in range(8):
            q, k, v = (normal(100 + 3 * step + number, 1, heads, 1, width) for number in range(3))
            feeds = {"q": q, "k": k, "v": v, **caches}
            executor.run(feeds | {name: np.zeros_like(array) for name, array in caches.items()})  # made for this shape
            found = executor.run(feeds)
            keys, values = np.concatenate([keys, k], 2), np.concatenate([values, v], 2)
            np.testing.assert_array_equal(found["present_k"], keys)
            np.testing.assert_array_equal(found["present_v"], values)
            np.testing.assert_allclose(found["y"], attention(q, keys, values, scale), atol=1e-5)
            assert not executor.net().workspace.fetch_blob("past_k").any(), "the past was copied into the net"
            caches = {"past_k": found["present_k"], "past_v": found["present_v"]}
