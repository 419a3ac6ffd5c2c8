"""inner-products: products with constant matrices."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.compiler.passes import batch_norm_folding
from dagexec.compiler.passes.inner_products import PASS
from dagexec.compiler.passes.types import infer_types
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import (
    Array,
    assert_close,
    model_of,
    normal,
    op,
    outputs_of,
    rewritten,
    types_of,
    unchanged,
)

MATRICES = {"x": (3, 5)}
PRODUCTS = [
    op("Gemm", ["x", "w", "c"], ["y"]),
    op("Gemm", ["x", "v", "c"], ["y"], trans_b=1, alpha=0.5, beta=2.0),
    op("Gemm", ["x", "w"], ["y"], alpha=-1.5),
    op("Gemm", ["x", "w", "row"], ["y"]),
    op("Gemm", ["x", "w", "one"], ["y"], beta=3.0),
    op("MatMul", ["x", "w"], ["y"]),
    op("MatMul", ["x", "v"], ["y"], trans_b=1),
    op("BatchMatMul", ["x", "w"], ["y"], broadcast=1),
    op("FCTransposed", ["x", "w", "c"], ["y"]),
]


def weights() -> dict[str, Array]:
    return {
        "w": normal(5, 4),
        "v": normal(4, 5),
        "c": normal(4),
        "row": normal(1, 4),
        "one": normal(1),
        "full": normal(3, 4),
    }


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda one: f"{one.type}-{len(one.input)}")
def test_a_product_with_a_constant_matrix_becomes_an_fc(product: OperatorDef) -> None:
    (left,) = rewritten(PASS, model_of([product], inputs=MATRICES, **weights()))
    assert left.startswith("FC x ")


def test_weights_that_are_rows_of_units_already_are_used_as_they_are() -> None:
    model = model_of([op("Gemm", ["x", "v", "c"], ["y"], trans_b=1)], inputs=MATRICES, **weights())
    assert rewritten(PASS, model)[0].startswith("FC x v ")


def test_a_product_of_a_stack_keeps_its_leading_axes() -> None:
    model = model_of([op("BatchMatMul", ["x", "w"], ["y"], broadcast=1)], inputs={"x": (None, 3, 5)}, **weights())
    assert rewritten(PASS, model)[0].startswith("FC x ")


def of_unknown_rank() -> Model:
    """A product of what has a shape only where two free sizes agree, and then a constant."""
    operators = [
        op("Transpose", ["past"], ["rows"], axes=[1, 0]),
        op("Concat", ["rows", "x"], ["joined"], axis=1),
        op("BatchMatMul", ["joined", "w"], ["product"], broadcast=1),
        op("Add", ["product", "c"], ["y"]),
    ]
    return model_of(operators, inputs={"past": (3, None), "x": (None, 2)}, **weights())


def test_a_product_of_any_number_of_axes_joins_the_leading_ones_in_a_run() -> None:
    assert "joined" not in infer_types(of_unknown_rank())
    assert rewritten(PASS, of_unknown_rank())[2].startswith("FC joined ")


def test_a_constant_behind_it_is_its_bias() -> None:
    layer = PASS.apply(of_unknown_rank()).model
    assert types_of(layer) == ["Transpose", "Concat", "FC", "Add"]
    assert [one.split()[0] for one in rewritten(batch_norm_folding.PASS, layer)][1:] == ["Concat", "FC"]


def test_a_constant_of_more_axes_stays_behind_it() -> None:
    model = of_unknown_rank()
    model.parameters["c"] = normal(1, 2, 4)
    assert unchanged(batch_norm_folding.PASS, PASS.apply(model).model)


@pytest.mark.parametrize(
    "product",
    [
        op("Gemm", ["x", "w", "full"], ["y"]),
        op("Gemm", ["x", "w"], ["y"], trans_a=1),
        op("MatMul", ["w", "x"], ["y"]),
        op("MatMul", ["x", "w", "full"], ["y"]),
    ],
)
def test_what_is_no_layer_stays(product: OperatorDef) -> None:
    assert unchanged(PASS, model_of([product], inputs={"x": (5, 5)} if product.arg else MATRICES, **weights()))


def test_a_matrix_that_is_fed_is_no_constant() -> None:
    fed = {"x": (3, 5), "w": (5, 4)}
    assert unchanged(PASS, model_of([op("MatMul", ["x", "w"], ["y"])], inputs=fed, **weights()))


def test_a_last_layer_reads_the_weights_of_an_embedding() -> None:
    table = normal(600, 512)
    lookup = op("Gather", ["table", "numbers"], ["x"])
    model = model_of(
        [lookup, op("MatMul", ["x", "turned"], ["y"])],
        inputs={},
        table=table,
        turned=np.ascontiguousarray(table.T),
        numbers=np.arange(3),
    )
    result = PASS.apply(model).model
    layer = result.net.op[1]
    assert (layer.type, layer.input[1]) == ("FC", "table")
    assert {argument.name: argument.i for argument in layer.arg} == {"plain_weights": 1}
    assert_close(outputs_of(result, {}), outputs_of(model, {}))


def test_weights_of_the_same_shape_are_no_others() -> None:
    table = normal(600, 512)
    turned = table.T.copy()
    turned[511, 599] += 1
    lookup = op("Gather", ["table", "numbers"], ["x"])
    model = model_of(
        [lookup, op("MatMul", ["x", "turned"], ["y"])], inputs={}, table=table, turned=turned, numbers=np.arange(3)
    )
    assert PASS.apply(model).model.net.op[1].input[1] == "turned/transposed"
