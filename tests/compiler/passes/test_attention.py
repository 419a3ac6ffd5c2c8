"""attention: what is recognized, in the spellings of exporters, and that nothing else is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec.compiler.passes import run_passes
from dagexec.compiler.passes.attention import PASS
from dagexec.compiler.passes.catalog import GRAPH_PASSES
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import Array, feeds_for, model_of, normal, op, outputs_of, rewritten, unchanged

HEADS, WIDTH = 4, 8
IN_ORDER, MERGED = [0, 2, 1, 3], HEADS * WIDTH
SHAPES = {"q": (None, None, MERGED), "k": (None, None, MERGED), "v": (None, None, MERGED)}


def number(value: float) -> Array:
    return np.array(value, np.float32)


NUMBERS = {"root": number(WIDTH**0.25), "part": number(WIDTH**-0.25), "width": number(math.sqrt(WIDTH))}
ZERO, LOW = {"zero": number(0)}, {"low": number(-1e4), "least": number(-math.inf)}


def split(name: str, heads: int = HEADS) -> OperatorDef:
    return op("Reshape", [name], [f"{name}4"], shape=[0, 0, heads, -1])


def moved(name: str, *axes: int) -> OperatorDef:
    return op("Transpose", [f"{name}4"], [f"{name}h"], axes=list(axes))


HEADS_APART = [split("q"), split("k"), split("v"), moved("q", *IN_ORDER), moved("v", *IN_ORDER)]
KEYS_TURNED = [*HEADS_APART, moved("k", 0, 2, 3, 1)]
END = [
    op("BatchMatMul", ["w", "vh"], ["o"], broadcast=1),
    op("Transpose", ["o"], ["t"], axes=IN_ORDER),
    op("Reshape", ["t"], ["y"], shape=[0, 0, -1]),
]
SOFTMAX = op("Softmax", ["s"], ["w"], axis=-1, single_axis=1)
PRODUCT = op("BatchMatMul", ["qh", "kh"], ["p"], broadcast=1)

SPELLINGS = {
    "bare": [*KEYS_TURNED, op("BatchMatMul", ["qh", "kh"], ["s"], broadcast=1), SOFTMAX, *END],
    "quotient": [*KEYS_TURNED, PRODUCT, op("Div", ["p", "width"], ["s"]), SOFTMAX, *END],
    "factors of both": [
        *KEYS_TURNED,
        op("Mul", ["qh", "part"], ["qs"]),
        op("Mul", ["part", "kh"], ["ks"]),
        op("BatchMatMul", ["qs", "ks"], ["s"], broadcast=1),
        SOFTMAX,
        *END,
    ],
    "factor before the heads are apart": [
        op("Mul", ["q", "part"], ["qm"]),
        op("Reshape", ["qm"], ["q4"], shape=[0, 0, HEADS, -1]),
        *KEYS_TURNED[1:],
        op("BatchMatMul", ["qh", "kh"], ["s"], broadcast=1),
        SOFTMAX,
        *END,
    ],
    "keys turned by the product": [
        *HEADS_APART,
        moved("k", *IN_ORDER),
        op("BatchMatMul", ["qh", "kh"], ["s"], broadcast=1, trans_b=1),
        SOFTMAX,
        *END,
    ],
    "no number becomes zero": [
        *KEYS_TURNED,
        op("BatchMatMul", ["qh", "kh"], ["s"], broadcast=1),
        op("Softmax", ["s"], ["m"], axis=3),
        op("NE", ["m", "m"], ["n"]),
        op("Where", ["n", "zero", "m"], ["w"]),
        *END,
    ],
    "two biases": [
        *KEYS_TURNED,
        PRODUCT,
        op("Add", ["p", "all"], ["p2"]),
        op("Add", ["one", "p2"], ["s"]),
        SOFTMAX,
        *END,
    ],
    "a scale, then a bias": [
        *KEYS_TURNED,
        PRODUCT,
        op("Scale", ["p"], ["p2"], scale=0.5),
        op("Add", ["p2", "all"], ["s"]),
        SOFTMAX,
        *END,
    ],
    "a choice, then a bias": [
        *KEYS_TURNED,
        PRODUCT,
        op("Where", ["shown", "p", "low"], ["p2"]),
        op("Add", ["p2", "all"], ["s"]),
        SOFTMAX,
        *END,
    ],
    "a cap": [
        *KEYS_TURNED,
        op("Mul", ["qh", "part"], ["qs"]),
        op("BatchMatMul", ["qs", "kh"], ["p"], broadcast=1),
        op("Div", ["p", "width"], ["p2"]),
        op("Tanh", ["p2"], ["p3"]),
        op("Mul", ["p3", "width"], ["p4"]),
        op("Where", ["shown", "p4", "low"], ["p5"]),
        op("Add", ["p5", "all"], ["s"]),
        SOFTMAX,
        *END,
    ],
    "a choice of what is hidden": [
        *KEYS_TURNED,
        PRODUCT,
        op("Where", ["hidden", "least", "p"], ["s"]),
        SOFTMAX,
        *END,
    ],
}
SHOWN = np.tri(5, 5, dtype=np.bool_)
PARAMETERS = {
    **NUMBERS, **ZERO, **LOW, "all": normal(1, HEADS, 5, 5), "one": normal(5), "shown": SHOWN, "hidden": ~SHOWN
}  # fmt: skip
FIVE = dict.fromkeys("qkv", (None, 5, MERGED))


def used(operators: list[OperatorDef]) -> dict[str, Array]:
    names = {name for one in operators for name in one.input}
    return {name: array for name, array in PARAMETERS.items() if name in names}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_recognized_and_its_heads_are_read_where_they_lie(name: str) -> None:
    operators = SPELLINGS[name]
    found = rewritten(PASS, model_of(operators, inputs=FIVE, **used(operators)))
    types = {line.split()[0] for line in found}
    assert not {"Softmax", "BatchMatMul", "Transpose", "Where", "NE", "Div"}.intersection(types)
    [attention] = [line for line in found if line.startswith("FusedAttention")]
    assert attention.startswith("FusedAttention q4 k4 v4")


def test_a_cap_is_the_factor_behind_the_tangent() -> None:
    model = PASS.apply(model_of(SPELLINGS["a cap"], inputs=FIVE, **used(SPELLINGS["a cap"]))).model
    [attention] = [node for node in model.program.op if node.type == "FusedAttention"]
    arguments = attention.arguments("y")
    assert arguments.float("softcap", 0.0) == pytest.approx(math.sqrt(WIDTH))
    assert arguments.float("scale", 1.0) == pytest.approx(WIDTH**-0.25)


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_a_bias_may_be_for_a_batch_of_which_the_scores_are_one_example(batch: int, rows: int) -> None:
    operators = [
        *KEYS_TURNED,
        PRODUCT,
        op("Scale", ["p"], ["p2"], scale=0.5),
        op("Add", ["p2", "bias"], ["s"]),
        SOFTMAX,
    ]
    model = model_of([*operators, *END], inputs={**FIVE, "bias": (None, 1, 5, 5)})
    made = PASS.apply(model).model
    assert "FusedAttention" in {one.type for one in made.net.op}
    feeds = {name: normal(batch, 5, MERGED) for name in "qkv"} | {"bias": normal(rows, 1, 5, 5)}
    expected = outputs_of(model, feeds)["y"]
    assert expected.shape[0] == max(batch, rows)
    np.testing.assert_allclose(outputs_of(made, feeds)["y"], expected, rtol=1e-5, atol=1e-6)


def test_keys_turned_as_three_axes_are_followed() -> None:
    """PyTorch's exporter by torch.export writes K^T as Reshape, Transpose, Reshape."""
    operators = [
        *HEADS_APART,
        moved("k", *IN_ORDER),
        op("Reshape", ["kh"], ["k3"], shape=[-1, 5, WIDTH]),
        op("Transpose", ["k3"], ["kt"], axes=[0, 2, 1]),
        op("Reshape", ["kt"], ["k5"], shape=[2, HEADS, WIDTH, 5]),
        op("BatchMatMul", ["qh", "k5"], ["s"], broadcast=1),
        SOFTMAX,
        *END,
    ]
    found = rewritten(PASS, model_of(operators, inputs=dict.fromkeys("qkv", (2, 5, MERGED))))
    assert not [line for line in found if line.startswith("Transpose")]


@pytest.mark.parametrize("is_in_order", [True, False])
def test_heads_that_share_keys_are_followed_if_neighbors_do(is_in_order: bool) -> None:
    """Keys k0 k0 k1 k1 are shared by groups, keys k0 k1 k0 k1 are not."""
    axis, groups = (2, [2, 2, 2, 5, WIDTH]) if is_in_order else (1, [2, 2, 2, 5, WIDTH])
    repeated = [
        one
        for name in "kv"
        for one in (
            op("ExpandDims", [f"{name}h"], [f"{name}5"], dims=[axis]),
            op("Expand", [f"{name}5"], [f"{name}6"], shape=groups),
            op("Reshape", [f"{name}6"], [f"{name}7"], shape=[2, 4, 5, WIDTH]),
        )
    ]
    operators = [
        split("q"), split("k", 2), split("v", 2), *(moved(name, *IN_ORDER) for name in "qkv"), *repeated,
        op("BatchMatMul", ["qh", "k7"], ["s"], broadcast=1, trans_b=1), SOFTMAX,
        op("BatchMatMul", ["w", "v7"], ["o"], broadcast=1), *END[1:],
    ]  # fmt: skip
    inputs = {"q": (2, 5, MERGED), "k": (2, 5, 2 * WIDTH), "v": (2, 5, 2 * WIDTH)}
    found = rewritten(PASS, model_of(operators, inputs=inputs))
    [attention] = [line for line in found if line.startswith("FusedAttention")]
    assert attention.startswith(f"FusedAttention q4 {'k4 v4' if is_in_order else 'k7 v7'}")


def test_heads_are_split_off_by_sizes_of_another_input() -> None:
    """Where that is larger, a size of -1 makes one head of what is left, to which biases of all heads are added."""
    sizes = [
        op("Shape", ["m"], ["sizes"]),
        op("Concat", ["sizes", "rest"], ["four"], axis=0),
        *(op("Reshape", [name, "four"], [f"{name}4"]) for name in "qkv"),
    ]
    masked = [PRODUCT, op("Add", ["p", "low"], ["s"]), SOFTMAX]
    operators = [*sizes, *KEYS_TURNED[3:], *masked, *END]
    inputs = {**SHAPES, "m": (None, None)}
    del inputs["k"], inputs["v"]
    operators = [op("Relu", ["q"], ["k"]), op("Tanh", ["q"], ["v"]), *operators]
    model = model_of(operators, inputs=inputs, rest=np.array([-1, WIDTH]), low=normal(1, HEADS, 1, 1))
    assert "FusedAttention" in {one.type for one in PASS.apply(model).model.net.op}


OTHERS = {
    "the scores are an output": (SPELLINGS["bare"], ("y", "s")),
    "the weights are an output": (SPELLINGS["bare"], ("y", "w")),
    "a softmax over the queries": (
        [*SPELLINGS["bare"][:-4], op("Softmax", ["s"], ["w"], axis=2, single_axis=1), *END],
        "y",
    ),
    "a factor behind a bias": (
        [*KEYS_TURNED, PRODUCT, op("Add", ["p", "all"], ["p2"]), op("Mul", ["p2", "part"], ["s"]), SOFTMAX, *END],
        "y",
    ),
    "another function of the scores": ([*KEYS_TURNED, PRODUCT, op("Sigmoid", ["p"], ["s"]), SOFTMAX, *END], "y"),
    "a bias before the cap": (
        [*KEYS_TURNED, PRODUCT, op("Add", ["p", "all"], ["p2"]), op("Tanh", ["p2"], ["s"]), SOFTMAX, *END],
        "y",
    ),
    "a cap of a cap": (
        [*KEYS_TURNED, PRODUCT, op("Tanh", ["p"], ["p2"]), op("Tanh", ["p2"], ["s"]), SOFTMAX, *END],
        "y",
    ),
    "a negative cap": (
        [*KEYS_TURNED, PRODUCT, op("Tanh", ["p"], ["p2"]), op("Scale", ["p2"], ["s"], scale=-2.0), SOFTMAX, *END],
        "y",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_attention_stays(name: str) -> None:
    operators, outputs = OTHERS[name]
    assert unchanged(PASS, model_of(operators, outputs, inputs=FIVE, **used(operators)))


def test_a_bias_that_does_not_broadcast_to_the_scores_stays_an_operator() -> None:
    """It makes more scores than there are products."""
    operators = [*SPELLINGS["two biases"]]
    wide = {**used(operators), "one": normal(3, 1, HEADS, 5, 5)[0], "all": normal(1, 2 * HEADS, 5, 5)}
    inputs = dict.fromkeys("qkv", (1, 5, WIDTH))
    operators = [split(name, 1) for name in "qkv"] + operators[3:]
    assert unchanged(PASS, model_of(operators, inputs=inputs, **wide))


@pytest.mark.parametrize(
    "name", ["a cap", "a choice, then a bias", "no number becomes zero", "a choice of what is hidden"]
)
def test_rows_without_a_visible_key_come_out_as_they_were(name: str) -> None:
    """With no key, with keys that are no numbers, with infinite scores; all passes together."""
    operators = SPELLINGS[name]
    model = model_of(operators, inputs=FIVE, **used(operators))
    parameters = dict(model.parameters)
    if "hidden" in parameters:
        parameters["hidden"] = np.ones((5, 5), np.bool_)
    feeds = feeds_for(model)
    feeds["q"][0, 0, :WIDTH] = np.nan
    feeds["k"][0, 1, :WIDTH] = np.inf
    feeds["v"][1, 2, 0] = -np.inf
    given = model_of(operators, inputs=FIVE, **parameters) if "hidden" in parameters else model
    made = run_passes(given, GRAPH_PASSES).model
    assert "FusedAttention" in {one.type for one in made.net.op}
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(outputs_of(made, feeds)["y"], outputs_of(given, feeds)["y"], rtol=1e-5, atol=1e-6)
