"""A row has the bytes that it has alone, whatever the batch, by oneDNN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.choices import choices, measuring
from dagexec.core.operator import Operator
from dagexec.core.registry import create_operator
from dagexec.core.tensor import Tensor
from dagexec.ops.base.layout import BLOCKS
from dagexec.ops.engines.onednn.availability import widest_blocks
from dagexec.ops.engines.onednn.convolution_family import ConvolutionFamily
from dagexec.ops.engines.onednn.problem import Candidate, Problem
from tests.ops.onednn.engine import needs_onednn, normal
from tests.ops.pieces import cut_into
from tests.ops.running import operator_def

pytestmark = needs_onednn

Array = npt.NDArray[Any]


def made(
    op_type: str, rows: Sequence[Array], shared: Sequence[Array], fed: bool = False, **arguments: ArgumentValue
) -> tuple[Workspace, Operator]:
    """An operator on arrays whose first axis is that of rows, and on arrays that are the same for all."""
    workspace = Workspace()
    inputs = {f"shared{place}": array for place, array in enumerate(shared)}
    names = ["rows0", *inputs, *(f"rows{place + 1}" for place in range(len(rows) - 1))]
    for name, array in inputs.items():
        workspace.feed_blob(name, array)
        if not fed:
            workspace.get_blob(name).get(Tensor).freeze()
    for place, array in enumerate(rows):
        workspace.feed_blob(f"rows{place}", array)
    definition = operator_def(op_type, names, ["y"], **{"engine": "ONEDNN", **arguments})
    return workspace, create_operator(definition, workspace)


def computed(op_type: str, rows: Sequence[Array], *given: Any, pieces: int = 0, **arguments: Any) -> Array:
    workspace, operator = made(op_type, rows, *given, **arguments)
    with cut_into(pieces):
        operator.bind(operator.infer())()
    return np.array(workspace.fetch_blob("y"))


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_images_in_blocks_of_channels_on_any_number_of_threads(kernel: int) -> None:
    """They are cut by channels of the result, each piece with its part of the filter, the bias and what is added."""
    order = widest_blocks()
    size = BLOCKS[order]

    def in_blocks(images: Array) -> Array:
        count, channels, *pixels = images.shape
        return np.ascontiguousarray(np.moveaxis(images.reshape(count, channels // size, size, *pixels), 2, -1))

    x, w, b = normal(1, 3, 32, 24, 24), normal(2, 96, 32, kernel, kernel) / kernel, normal(3, 96)
    y = normal(4, 3, 96, 24, 24)
    arguments: dict[str, Any] = {"kernel": kernel, "pad": kernel // 2, "bias": 1, "post_ops": ["add:3", "relu"]}
    found = {
        pieces: computed("FusedConv", [in_blocks(x), in_blocks(y)], [w, b], order=order, pieces=pieces, **arguments)
        for pieces in (1, 2, 3)
    }
    assert len({array.tobytes() for array in found.values()}) == 1
    lone = computed("FusedConv", [in_blocks(x)[1:2], in_blocks(y)[1:2]], [w, b], order=order, pieces=2, **arguments)
    assert lone[0].tobytes() == found[1][1].tobytes()
    exact = computed("FusedConv", [x, y], [w, b], **arguments, engine="")
    np.testing.assert_allclose(found[1], in_blocks(exact), rtol=0, atol=2e-5 * np.abs(exact).max())


def test_what_adds_up_in_another_order_computes_in_pieces() -> None:
    """On the caller's memory, too, and with what post-ops read of each image."""
    x, w, y = normal(1, 5, 6, 6, 4), normal(2, 5, 3, 3, 4), normal(4, 5, 4, 4, 5)
    arguments: dict[str, Any] = {"kernel": 3, "bias": 1, "post_ops": ["add:3"], "order": "NHWC"}
    workspace, operator = made("FusedConv", [x, y], [w, normal(3, 5)], **arguments)
    with cut_into(4):
        prepared = operator.bind(operator.infer())
    prepared()
    together = np.array(workspace.fetch_blob("y"))
    exact = computed("FusedConv", [x, y], [w, normal(3, 5)], **arguments, engine="")
    np.testing.assert_allclose(together, exact, rtol=1e-5, atol=1e-5)
    assert set(prepared.input_rebinds) == {0, 3}
    backwards = {0: x[::-1].copy(), 3: y[::-1].copy()}
    for index, array in backwards.items():
        prepared.input_rebinds[index](array)
    elsewhere = np.empty_like(together)
    prepared.output_rebinds[0](elsewhere)
    prepared()
    assert elsewhere[::-1].tobytes() == together.tobytes()


def test_what_is_chosen_is_chosen_for_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    chosen = ConvolutionFamily.implementation

    def watched(self: ConvolutionFamily, problem: Problem) -> Candidate:
        batches.append(problem.batch)
        return chosen(self, problem)

    monkeypatch.setattr(ConvolutionFamily, "implementation", watched)
    x, w = normal(1, 3, 4, 6, 6), normal(2, 5, 4, 3, 3)
    workspace, operator = made("Conv", [x], [w], kernel=3)
    for size in (3, 2, 1):
        workspace.feed_blob("rows0", x[:size])
        operator.bind(operator.infer())
    assert batches == [1], "once for all batches"


@pytest.mark.parametrize("pieces", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op_type", ["FC", "Conv"])
def test_what_is_measured_for_one_batch_is_chosen_for_all(op_type: str, pieces: int) -> None:
    """By new operators, as those of another net, too."""
    x, w = (
        (normal(1, 17, 8, 6, 6), normal(2, 16, 8, 3, 3))
        if op_type == "Conv"
        else (normal(1, 17, 96), normal(2, 64, 96))
    )
    arguments: dict[str, Any] = {"pieces": pieces} | ({"kernel": 3} if op_type == "Conv" else {})
    shared = [w, normal(3, len(w))]
    choices.forget()
    try:
        with measuring(60):
            found = {size: computed(op_type, [x[:size]], shared, **arguments) for size in (7, 1, 17)}
        assert len(choices.all()) == 1
    finally:
        choices.forget()
    for size in (1, 7):
        assert found[size].tobytes() == found[17][:size].tobytes()
