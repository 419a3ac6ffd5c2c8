"""inner-products: products with constant matrices."""

from __future__ import annotations

import pytest

from dagexec.compiler.passes.inner_products import PASS
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import Array, model_of, normal, op, rewritten, unchanged

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
