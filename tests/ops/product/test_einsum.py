"""Einsum against `numpy.einsum`, on equations drawn at random and on those that models have."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec.core.gradient import gradient
from dagexec.errors import ArgumentError, DagexecError, GradientError, ShapeError
from tests.memory_limits import peak_memory
from tests.ops.running import Array, operator_def, run_operator
from tests.ops.test_steady_state import prepared

SIZES = {"a": 2, "b": 3, "c": 1, "d": 4, "e": 2}


def random_equation(rng: np.random.Generator) -> tuple[str, list[tuple[int, ...]]]:
    """Up to three terms, with letters that repeat, axes of size 1 where others are longer, an ellipsis at times."""
    terms, shapes = [], []
    dots = rng.random() < 0.3
    for _ in range(rng.integers(1, 4)):
        letters = "".join(rng.choice(list(SIZES), rng.integers(0, 4)))
        shape = [1 if rng.random() < 0.1 else SIZES[letter] for letter in letters]
        at = int(rng.integers(0, len(letters) + 1))
        if dots and rng.random() < 0.7:
            hidden = [1, 2, 3][: rng.integers(0, 4)][::-1]
            letters, shape = f"{letters[:at]}...{letters[at:]}", [*shape[:at], *hidden, *shape[at:]]
        terms.append(letters)
        shapes.append(tuple(shape))
    left = ",".join(terms)
    if rng.random() < 0.2:
        return left, shapes
    known = sorted(set(left) - {",", "."})
    output = [str(letter) for letter in rng.permutation(known)[: rng.integers(0, len(known) + 1)]]
    return f"{left} -> {''.join(output[:1])}{'...' * ('.' in left)}{''.join(output[1:])}", shapes


def expected(equation: str, arrays: list[Array]) -> Array:
    """NumPy's; it wants axes that are named twice in a term to be equal, stretched ones too."""
    return np.asarray(np.einsum(equation, *arrays))


def test_random_equations_give_what_numpy_gives() -> None:
    """With whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(3)
    compared = 0
    for _ in range(30):
        equation, shapes = random_equation(rng)
        dtype = rng.choice(np.array([np.float64, np.float32, np.int64, np.uint8], object))
        arrays = [rng.integers(0, 4, shape).astype(dtype) for shape in shapes]
        try:
            wanted = expected(equation, arrays)
        except ValueError:
            continue
        compared += 1
        [found] = run_operator("Einsum", arrays, equation=equation)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, wanted, f"{equation} {shapes}")
    assert compared > 15


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sums_of_16_bit_floats_are_rounded_once(dtype: Any) -> None:
    rows = np.ones((2, 3000), dtype)
    [found] = run_operator("Einsum", [rows, rows], equation="ij,kj->ik")
    np.testing.assert_array_equal(found, np.full((2, 2), 3000).astype(dtype))


ATTENTION = ["bhqd,bhkd->bhqk", "bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", "bij,jk->bik", "bi,bi->b", "ij,jk,kl->il"]


@pytest.mark.parametrize("equation", ATTENTION)
def test_a_second_run_allocates_no_tensor(equation: str) -> None:
    sizes = {letter: 32 + index for index, letter in enumerate("bdhijklq")}
    sizes["b"] = sizes["h"] = 4
    rng = np.random.default_rng(1)
    terms = equation.partition("->")[0].split(",")
    arrays = [rng.normal(size=[sizes[letter] for letter in term]) for term in terms]
    workspace, net = prepared("Einsum", arrays, {"equation": equation}, np.float32)
    with net:
        net.run()
        assert peak_memory(net.run) < 4096
    np.testing.assert_allclose(workspace.fetch_blob("y"), expected(equation, arrays), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("equation", "kind", "message"),
    [
        ("ij,j", ShapeError, "2 terms for 1 inputs"),
        ("ijk->i", ShapeError, "term 'ijk' of the equation does not fit a tensor of 2 axes"),
        ("ii->i", ShapeError, "axis 'i' of the equation has sizes 2 and 3"),
        ("ij->k", ArgumentError, "'ij->k'"),
        ("ij->ii", ArgumentError, "names an axis twice"),
        ("i.j->i", ArgumentError, "is not understood"),
        ("......->", ArgumentError, "is not understood"),
        ("i1->i", ArgumentError, "is not understood"),
    ],
)
def test_an_equation_that_makes_no_sense_is_refused(equation: str, kind: type[DagexecError], message: str) -> None:
    with pytest.raises(DagexecError, match=message) as caught:
        run_operator("Einsum", [np.ones((2, 3))], equation=equation)
    assert isinstance(caught.value, kind)


@pytest.mark.parametrize("equation", ["ii,i->i", "...i,i->...", "ij,k->k"])
def test_a_gradient_that_is_no_equation_of_the_same_kind_is_refused(equation: str) -> None:
    with pytest.raises(GradientError, match="has no gradient by input 0"):
        gradient(operator_def("Einsum", ["a", "b"], ["y"], equation=equation), ["dy"])
