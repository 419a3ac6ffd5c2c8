"""residual-fusion: sums behind layers."""

from __future__ import annotations

import pytest

from dagexec.compiler.passes.residual_fusion import PASS
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import Array, model_of, normal, op, post_ops, rewritten, types_of, unchanged


def conv(source: str, target: str, kernel: int = 1, **arguments: int) -> OperatorDef:
    return op("Conv", [source, f"w{kernel}", "b"], [target], kernel=kernel, pad=kernel // 2, **arguments)


def weights() -> dict[str, Array]:
    return {"w1": normal(4, 4, 1, 1), "w3": normal(4, 4, 3, 3), "b": normal(4), "v": normal(4, 1, 1)}


def fused_post_ops(operators: list[OperatorDef], outputs: list[str] | None = None) -> list[list[str]]:
    """The post-ops of each fused layer after the pass, which must keep the results."""
    model = model_of(operators, outputs or ["y"], **weights())
    rewritten(PASS, model)
    return [post_ops(one) for one in PASS.apply(model).model.net.op if one.type.startswith("Fused")]


BLOCK = [
    op("Relu", ["x"], ["r"]),
    conv("r", "c"),
    conv("c", "d", 3),
    op("Add", ["d", "r"], ["e"]),
    op("Relu", ["e"], ["y"]),
]


def test_a_block_with_its_input_added_works_in_place() -> None:
    assert rewritten(PASS, model_of(BLOCK, **weights())) == [
        "Relu x -> y", "Conv y w1 b -> c", "FusedConv c w3 b y -> y",
    ]  # fmt: skip
    assert fused_post_ops(BLOCK) == [["sum:3", "relu"]]


@pytest.mark.parametrize(
    "total", [op("Sum", ["r", "d"], ["y"]), op("Add", ["r", "d"], ["y"]), op("Sum", ["d", "r"], ["y"])]
)
def test_whichever_way_round_the_sum_is(total: OperatorDef) -> None:
    assert fused_post_ops([*BLOCK[:3], total]) == [["sum:3"]]


def test_a_chain_of_blocks_works_in_one_buffer() -> None:
    second = [conv("y", "f"), conv("f", "g", 3), op("Sum", ["g", "y"], ["h"]), op("Relu", ["h"], ["z"])]
    model = model_of([*BLOCK, *second], "z", **weights())
    left = rewritten(PASS, model)
    assert [line for line in left if "-> z" in line] == [
        "Relu x -> z",
        "FusedConv c w3 b z -> z",
        "FusedConv f w3 b z -> z",
    ]


def test_of_two_branches_the_later_one_adds() -> None:
    operators = [conv("x", "c"), conv("c", "d", 3), conv("x", "s"), op("Sum", ["s", "d"], ["y"])]
    assert rewritten(PASS, model_of(operators, **weights())) == [
        "Conv x w1 b -> c", "Conv x w1 b -> y", "FusedConv c w3 b y -> y",
    ]  # fmt: skip


def test_what_is_read_later_or_by_somebody_else_is_added_without_being_overwritten() -> None:
    pointwise = [op("Relu", ["x"], ["r"]), conv("r", "c"), conv("c", "d"), op("Add", ["d", "r"], ["y"])]
    assert fused_post_ops(pointwise) == [["sum:3"]]
    later = [*pointwise, op("Mul", ["r", "y"], ["z"])]
    assert fused_post_ops(later, ["y", "z"]) == [["add:3"]]
    unordered = [*pointwise, op("Tanh", ["r"], ["z"])]
    assert fused_post_ops(unordered, ["y", "z"]) == [["add:3"]]
    ordered = [pointwise[0], op("Tanh", ["r"], ["t"]), conv("t", "c"), *pointwise[2:]]
    assert fused_post_ops(ordered) == [["sum:3"]]


def test_inputs_outputs_and_constants_are_not_overwritten() -> None:
    assert fused_post_ops([conv("x", "d"), op("Add", ["d", "x"], ["y"])]) == [["add:3"]]
    assert fused_post_ops([*BLOCK[:2], op("Add", ["c", "r"], ["y"])], ["y", "r"]) == [["add:3"]]


def test_the_layers_own_input_is_not_overwritten_while_it_is_read() -> None:
    assert fused_post_ops([op("Relu", ["x"], ["r"]), conv("r", "d"), op("Add", ["d", "r"], ["y"])]) == [["add:3"]]


@pytest.mark.parametrize("sharing", [op("Flatten", ["r"], ["f"]), op("Concat", ["r", "r"], ["f"], axis=1)])
def test_what_may_share_memory_with_another_blob_is_not_overwritten(sharing: OperatorDef) -> None:
    operators = [op("Relu", ["x"], ["r"]), sharing, op("ReduceSum", ["f"], ["t"]), op("Add", ["r", "t"], ["u"])]
    operators += [conv("u", "d"), op("Add", ["d", "r"], ["y"])]
    assert fused_post_ops(operators) == [["add:3"]]


def test_a_layer_for_winograd_does_not_take_an_operand_that_it_cannot_overwrite() -> None:
    operators = [*BLOCK, op("Tanh", ["r"], ["z"])]
    assert unchanged(PASS, model_of(operators, ["y", "z"], **weights()))
    strided = [conv("x", "d", 3, stride=2), op("Add", ["d", "s"], ["y"])]
    model = model_of(strided, inputs={"x": (2, 4, 6, 6), "s": (2, 4, 3, 3)}, **weights())
    assert types_of(PASS.apply(model).model) == ["FusedConv"]


def test_a_layer_does_not_wait_for_a_branch_as_long_as_its_own() -> None:
    """Both branches would run side by side; fused, one would run after the other."""
    size, given = {"x": (1, 32, 14, 14)}, {"w3": normal(32, 32, 3, 3), "b": normal(32)}
    branches = [conv("x", "c", 3), conv("c", "d", 3), conv("x", "e", 3), conv("e", "f", 3)]
    total = op("Sum", ["d", "f"], ["y"])
    assert unchanged(PASS, model_of([*branches, total], inputs=size, **given))
    longer = [*branches, conv("f", "g", 3), op("Sum", ["d", "g"], ["y"])]
    assert rewritten(PASS, model_of(longer, inputs=size, **given))[-1] == "FusedConv f w3 b y -> y"


def test_sums_in_a_row_go_into_one_layer() -> None:
    operators = [op("Relu", ["x"], ["r"]), conv("r", "c"), op("Add", ["c", "r"], ["d"]), op("Add", ["d", "x"], ["y"])]
    assert fused_post_ops(operators) == [["add:3", "add:4"]]


def test_a_fully_connected_layer_adds_too() -> None:
    operators = [op("Relu", ["x"], ["r"]), op("FC", ["r", "w", "b"], ["c"]), op("Tanh", ["c"], ["t"])]
    operators += [op("FC", ["t", "w", "b"], ["d"]), op("Add", ["r", "d"], ["y"])]
    model = model_of(operators, inputs={"x": (None, 5)}, w=normal(5, 5), b=normal(5))
    assert rewritten(PASS, model)[-1] == "FusedFC t w b y -> y"


def not_fused() -> dict[str, list[OperatorDef]]:
    total = BLOCK[3]
    waits, remote = OperatorDef(), OperatorDef()
    for copy in (waits, remote):
        copy.CopyFrom(total)
    waits.control_input.append("x")
    remote.device_option.device_type = 1
    start = BLOCK[:3]
    return {
        "another reader": [*start, total, op("Tanh", ["d"], ["z"]), op("Mul", ["e", "z"], ["y"])],
        "control input": [*start, waits, BLOCK[4]],
        "another device": [*start, remote, BLOCK[4]],
        "a smaller operand": [*start, op("ReduceSum", ["r"], ["s"], axes=[2, 3]), op("Add", ["d", "s"], ["y"])],
        "a constant": [*start, op("Add", ["d", "v"], ["y"])],
        "itself": [*start, op("Add", ["d", "d"], ["y"])],
        "no layer": [op("Relu", ["x"], ["r"]), op("Tanh", ["x"], ["d"]), op("Add", ["d", "r"], ["y"])],
    }


@pytest.mark.parametrize("why", not_fused())
def test_it_is_not_fused_for(why: str) -> None:
    assert unchanged(PASS, model_of(not_fused()[why], **weights()))


def test_unknown_shapes_are_not_added() -> None:
    operators = [conv("x", "c"), op("Add", ["c", "s"], ["y"])]
    free = model_of(operators, inputs={"x": (None, 4, None, None), "s": (None, 4, 6, 6)}, **weights())
    assert unchanged(PASS, free)
