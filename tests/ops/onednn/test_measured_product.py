"""Products with constant weights: by which of oneDNN's implementations, and that each of them is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from dagexec import Workspace
from dagexec.core.choices import choices, measuring
from dagexec.core.tensor import Tensor
from dagexec.ops.engines.onednn import measured_product
from dagexec.ops.engines.onednn import measuring as measurement
from dagexec.ops.engines.onednn.implementation import rule
from dagexec.ops.engines.onednn.measured_product import MeasuredProduct, WeightedProduct
from dagexec.ops.engines.onednn.problem import Problem
from tests.ops.onednn.engine import needs_onednn, normal
from tests.ops.onednn.test_product import layer
from tests.ops.running import Array, operator_def, run_net

pytestmark = needs_onednn


@pytest.fixture(autouse=True)
def no_choices() -> Iterator[None]:
    choices.forget()
    yield
    choices.forget()


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds by a candidate's name, which stand for its time; 1 for the others."""
    found: dict[str, float] = {}
    monkeypatch.setattr(measurement._Trial, "seconds", lambda trial: found.get(trial.candidate.name, 1.0))
    return found


def arrays_of(op_type: str, rows: int, inner: int, units: int) -> tuple[list[Array], Array]:
    """The inputs of a product, weights second, and what it gives."""
    x, w, b = normal(1, rows, inner), normal(2, units, inner), normal(3, units)
    fed = {"FC": [x, w, b], "FCTransposed": [x, w.T.copy(), b], "Gemm": [x, w.T.copy(), b], "MatMul": [x, w.T.copy()]}
    return fed[op_type], layer(x, w, b if op_type != "MatMul" else np.zeros_like(b))


def run(op_type: str, arrays: list[Array]) -> Array:
    """The product, with constant weights; each number of rows chooses for itself."""
    workspace = Workspace()
    names = ["x", "w", "b"][: len(arrays)]
    for name, array in zip(names, arrays, strict=True):
        workspace.feed_blob(name, array)
    workspace.get_blob("w").get(Tensor).freeze()
    definition = operator_def(op_type, names, ["y"], batch_invariant=0, engine="ONEDNN")
    run_net(workspace, definition)
    return np.array(workspace.fetch_blob("y"))


def problem_of(op_type: str, rows: int = 4, inner: int = 48, units: int = 40) -> Problem:
    """The problem that a product is."""
    found: list[Problem] = []
    with pytest.MonkeyPatch.context() as patch:
        made = MeasuredProduct._problem

        def watched(self: MeasuredProduct, product: WeightedProduct, arrays: Mapping[int, Array]) -> Problem:
            found.append(made(self, product, arrays))
            return found[-1]

        patch.setattr(MeasuredProduct, "_problem", watched)
        arrays, _ = arrays_of(op_type, rows, inner, units)
        run(op_type, arrays)
    return found[0]


KINDS = ("FC", "FCTransposed", "Gemm", "MatMul")


@pytest.mark.parametrize("op_type", KINDS)
def test_every_implementation_computes_the_product_when_it_is_chosen(op_type: str) -> None:
    arrays, expected = arrays_of(op_type, 4, 48, 40)
    names = [one.name for one in problem_of(op_type).candidates() if not one.is_reference]
    assert any(name.startswith("packed") for name in names)
    assert any(name.startswith("as it is") for name in names)
    assert any("gemm" in name.replace("brgemm", "") for name in names)
    with measuring(60):
        run(op_type, arrays)
    (key,) = choices.all()
    for name in names:
        choices.forget()
        choices.keep(key, name)
        found = run(op_type, arrays)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("op_type", KINDS)
def test_the_fastest_of_all_is_kept_general_ones_included(op_type: str, times: dict[str, float]) -> None:
    problem = problem_of(op_type)
    wanted = [one.name for one in problem.candidates() if not one.is_reference][-1]
    assert wanted != rule(problem).name
    times[wanted] = 0.1
    arrays, expected = arrays_of(op_type, 4, 48, 40)
    with measuring(60):
        found = run(op_type, arrays)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert list(choices.all().values()) == [wanted]


def test_without_a_measurement_one_row_reads_large_weights_as_they_are() -> None:
    assert rule(problem_of("FC", 1, 1024, 1002)).name.startswith("as it is")
    assert rule(problem_of("FC", 2, 1024, 1002)).name.startswith("matmul")
    assert rule(problem_of("FC", 1, 64, 64)).name.startswith("matmul")


@pytest.mark.parametrize("op_type", KINDS)
def test_of_large_weights_a_part_is_measured(
    op_type: str, times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, expected = arrays_of(op_type, 3, 64, 160)
    measured: list[int] = []
    fastest = measurement.fastest
    monkeypatch.setattr(
        "dagexec.ops.engines.onednn.implementation.fastest",
        lambda problem, *others: (measured.append(problem.weights_nbytes), fastest(problem, *others))[1],
    )
    monkeypatch.setattr(measured_product, "MAX_MEASURED", arrays[1].nbytes // 2)
    with measuring(60):
        found = run(op_type, arrays)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert measured == ([] if op_type == "Gemm" else [arrays[1].nbytes // 2]), "Gemm has an operand for all columns"


def test_products_are_told_apart_by_all_that_their_time_depends_on() -> None:
    keys = {
        problem_of("FC").key, problem_of("FC", rows=5).key, problem_of("FC", inner=49).key,
        problem_of("FC", units=41).key, problem_of("FCTransposed").key, problem_of("Gemm").key,
        problem_of("MatMul").key,
    }  # fmt: skip
    assert len(keys) == 7
