"""Update rules on some rows, against one row after the other by the formulas of single elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.arguments import ArgumentValue
from dagexec.errors import ArgumentError, DagexecError, SchemaError, ShapeError
from dagexec.ops.families.optimize.sparse import occurrences
from tests.ops.optimize import formulas
from tests.ops.optimize.updating import DEVICES, Array, Formula, counter, each_element, run_steps, scalar

RowRule = Callable[[Array, list[Array], Array, float, int], tuple[Array, list[Array], Array]]
"""Row of the parameter, its state, its gradient, rate and iteration to the new ones and the extra output."""


def by_element(formula: Formula) -> RowRule:
    """The rule that treats each element of a row on its own; several numbers of state an element are in a last axis."""

    def rule(
        row: Array, state: list[Array], grad: Array, rate: float, iteration: int
    ) -> tuple[Array, list[Array], Array]:
        def at(
            param: float, own: list[float], slope: float, speed: float, _step: int
        ) -> tuple[float, list[float], list[float]]:
            return formula(param, own, slope, speed, iteration)

        param, states, extras = each_element(at, row, state, [grad], [rate])
        return param, states, extras[0] if extras else np.zeros_like(row)

    return rule


def row_wise_adagrad(epsilon: float) -> RowRule:
    """One sum of squares for the row."""

    def rule(
        row: Array, state: list[Array], grad: Array, rate: float, _iteration: int
    ) -> tuple[Array, list[Array], Array]:
        total = state[0] + sum(slope * slope for slope in grad.reshape(-1)) / grad.size
        return row + rate * grad / (total**0.5 + epsilon), [total], np.zeros_like(row)

    return rule


def row_wise_adam(beta1: float, beta2: float, epsilon: float) -> RowRule:
    """One second moment for the row."""

    def rule(
        row: Array, state: list[Array], grad: Array, rate: float, iteration: int
    ) -> tuple[Array, list[Array], Array]:
        first = beta1 * state[0] + (1 - beta1) * grad
        second = beta2 * state[1] + (1 - beta2) * sum(slope * slope for slope in grad.reshape(-1)) / grad.size
        time = iteration + 1
        step = first * (1 - beta2**time) ** 0.5 / (1 - beta1**time) / (second**0.5 + epsilon)
        return row + rate * step, [first, second], step

    return rule


@dataclass(frozen=True)
class Case:
    """An operator with arguments, and what it does to a row.

    Attributes:
        state: of each state, "row" for one number a row, "pair" for two an element, "" for one an element.
    """

    type: str
    inputs: str
    outputs: str
    rule: RowRule
    state: tuple[str, ...]
    arguments: Mapping[str, ArgumentValue] = field(default_factory=dict)


ADAM = "param s0 s1 indices grad rate iteration"
CASES = {
    "momentum": Case(
        "SparseMomentumSGDUpdate", "grad s0 rate param indices", "e0 s0 param",
        by_element(formulas.momentum(0.75, False)), ("",), {"momentum": 0.75},
    ),
    "nesterov": Case(
        "SparseMomentumSGDUpdate", "grad s0 rate param indices", "e0 s0 param",
        by_element(formulas.momentum(0.75, True)), ("",), {"momentum": 0.75, "nesterov": 1},
    ),
    "adagrad": Case(
        "SparseAdagrad", "param s0 indices grad rate", "param s0", by_element(formulas.adagrad(1e-5)), ("",)
    ),
    "adagrad row": Case(
        "RowWiseSparseAdagrad", "param s0 indices grad rate", "param s0", row_wise_adagrad(0.25), ("row",),
        {"epsilon": 0.25},
    ),
    "adam": Case("SparseAdam", ADAM, "param s0 s1", by_element(formulas.adam(0.9, 0.999, 1e-5)), ("", "")),
    "adam step": Case(
        "SparseAdam", ADAM, "param s0 s1 e0", by_element(formulas.adam(0.5, 0.75, 0.25)), ("", ""),
        {"beta1": 0.5, "beta2": 0.75, "epsilon": 0.25},
    ),
    "radam": Case(
        "SparseAdam", ADAM, "param s0 s1 e0", by_element(formulas.rectified_adam(0.5, 0.875, 0.25)), ("", ""),
        {"beta1": 0.5, "beta2": 0.875, "epsilon": 0.25, "enableRAdam": 1},
    ),
    "adam row": Case("RowWiseSparseAdam", ADAM, "param s0 s1 e0", row_wise_adam(0.9, 0.999, 1e-5), ("", "row")),
    "adadelta": Case(
        "SparseAdadelta", "param s0 s1 indices grad rate", "param s0 s1", by_element(formulas.adadelta(0.95, 1e-5)),
        ("", ""),
    ),
    "ftrl": Case(
        "SparseFtrl", "param s0 indices grad", "param s0", by_element(formulas.ftrl(0.25, 0.5, 0.75, 0.125)), ("pair",),
        {"alpha": 0.25, "beta": 0.5, "lambda1": 0.75, "lambda2": 0.125},
    ),
    "ftrl alpha": Case(
        "SparseFtrl", "param s0 indices grad rate", "param s0", by_element(formulas.ftrl(None, 0.5, 0.75, 0.125)),
        ("pair",), {"beta": 0.5, "lambda1": 0.75, "lambda2": 0.125},
    ),
}  # fmt: skip
WITH_DUPLICATES = [3, 0, 3, 3, 1, 0]


def draw(case: Case, rows: int, width: tuple[int, ...], seed: int = 0) -> dict[str, Array]:
    """First values of parameter and state."""
    rng = np.random.default_rng(seed)
    blobs = {"param": rng.standard_normal((rows, *width)).astype(np.float32)}
    shapes = {"": (rows, *width), "row": (rows,), "pair": (rows, *width, 2)}
    for k, kind in enumerate(case.state):
        blobs[f"s{k}"] = rng.uniform(0.1, 1, shapes[kind]).astype(np.float32)
    return blobs


def gradients(blobs: Mapping[str, Array], indices: Sequence[int], steps: int, seed: int = 1) -> list[Array]:
    """A gradient for each step."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((len(indices), *blobs["param"].shape[1:])).astype(np.float32) for _ in range(steps)]


def run_case(
    case: Case,
    blobs: Mapping[str, Array],
    indices: Sequence[int],
    grads: Sequence[Array],
    *,
    start: int = 1,
    device: str = "cpu",
    dtype: type = np.int64,
    deduplicate: int = 0,
) -> dict[str, Array]:
    """What the operator leaves behind."""
    fed = [
        {"grad": grad, "indices": np.array(indices, dtype), "rate": scalar(0.5), "iteration": counter(iteration)}
        for iteration, grad in enumerate(grads, start)
    ]
    arguments = {**case.arguments, "deduplicate": deduplicate}
    first = {**blobs, **fed[0]}
    return run_steps(case.type, case.inputs.split(), case.outputs.split(), first, fed, device=device, **arguments)


def one_row_after_the_other(
    case: Case, blobs: Mapping[str, Array], indices: Sequence[int], grads: Sequence[Array], start: int = 1
) -> dict[str, Array]:
    """What the operator should leave behind."""
    tables = {name: array.astype(np.float64) for name, array in blobs.items()}
    names = [f"s{k}" for k in range(len(case.state))]
    extra = np.zeros(grads[-1].shape)
    for iteration, grad in enumerate(grads, start):
        for place, index in enumerate(indices):
            state = [tables[name][index] for name in names]
            row, states, step = case.rule(tables["param"][index], state, grad[place].astype(np.float64), 0.5, iteration)
            tables["param"][index], extra[place] = row, step
            for name, array in zip(names, states, strict=True):
                tables[name][index] = array
    return {**tables, "e0": extra}


def check(result: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Compare what is in both."""
    for name, array in result.items():
        np.testing.assert_allclose(array, expected[name], rtol=5e-6, atol=5e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_updated_in_the_order_of_the_indices(name: str, dtype: type, device: str) -> None:
    case = CASES[name]
    blobs = draw(case, 5, (3,))
    grads = gradients(blobs, WITH_DUPLICATES, 3)
    result = run_case(case, blobs, WITH_DUPLICATES, grads, device=device, dtype=dtype)
    check(result, one_row_after_the_other(case, blobs, WITH_DUPLICATES, grads))
    for table in result.keys() - {"e0"}:
        assert result[table][[2, 4]].tobytes() == blobs[table][[2, 4]].tobytes()


@pytest.mark.parametrize("name", CASES)
def test_with_deduplicate_rows_of_one_index_are_added_up_first(name: str) -> None:
    case = CASES[name]
    blobs = draw(case, 5, (3,))
    grads = gradients(blobs, WITH_DUPLICATES, 3)
    summed = [np.stack([grad[[0, 2, 3]].sum(0), grad[[1, 5]].sum(0), grad[4]]) for grad in grads]
    expected = one_row_after_the_other(case, blobs, [3, 0, 1], summed)
    expected["e0"] = np.insert(expected["e0"], [2, 2, 3], 0, axis=0)
    check(run_case(case, blobs, WITH_DUPLICATES, grads, deduplicate=1), expected)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(CASES)),
    st.integers(1, 6),
    st.sampled_from([(), (1,), (4,), (2, 3)]),
    st.data(),
)
def test_any_indices_and_widths_follow_the_formula(
    name: str, rows: int, width: tuple[int, ...], data: st.DataObject
) -> None:
    case = CASES[name]
    indices = data.draw(st.lists(st.integers(0, rows - 1), max_size=7))
    blobs = draw(case, rows, width)
    grads = gradients(blobs, indices, 2)
    check(run_case(case, blobs, indices, grads), one_row_after_the_other(case, blobs, indices, grads))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("deduplicate", [0, 1])
def test_blocks_of_rows_do_not_change_the_bytes(name: str, deduplicate: int) -> None:
    case = CASES[name]
    indices = [*range(40), *range(10, 30), 5, 5]
    blobs = draw(case, 41, (1000,))
    grads = gradients(blobs, indices, 1)
    result = run_case(case, blobs, indices, grads, deduplicate=deduplicate)
    for index in (0, 5, 17, 39):
        places = [place for place, found in enumerate(indices) if found == index]
        alone = run_case(case, blobs, [index] * len(places), [grads[0][places]], deduplicate=deduplicate)
        for table in result.keys() - {"e0"}:
            assert alone[table][index].tobytes() == result[table][index].tobytes()


def test_rectified_adam_first_takes_plain_steps_and_then_rectified_ones() -> None:
    case = CASES["radam"]
    blobs = draw(case, 2, (3,))
    grads = gradients(blobs, [1], 12)
    for steps in (1, 4, 5, 6, 12):
        result = run_case(case, blobs, [1], grads[:steps], start=0)
        check(result, one_row_after_the_other(case, blobs, [1], grads[:steps], start=0))


def test_rectified_adam_refuses_a_beta_it_cannot_rectify() -> None:
    case = replace(CASES["radam"], arguments={"beta2": 0.5, "enableRAdam": 1})
    blobs = draw(case, 2, (3,))
    with pytest.raises(ArgumentError, match=r"'beta2' must be in \(0.6, 1\), found 0.5"):
        run_case(case, blobs, [1], gradients(blobs, [1], 1))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_the_table_is_refused_before_anything_changes(name: str, index: int) -> None:
    case = CASES[name]
    blobs = draw(case, 5, (3,))
    with pytest.raises(DagexecError, match=rf"index {index} at place 1 must be in \[0, 5\)"):
        run_case(case, blobs, [0, index], gradients(blobs, [0, index], 1))


@pytest.mark.parametrize("name", CASES)
def test_no_indices_change_nothing(name: str) -> None:
    case = CASES[name]
    blobs = draw(case, 5, (3,))
    result = run_case(case, blobs, [], gradients(blobs, [], 2))
    for table in result.keys() - {"e0"}:
        assert result[table].tobytes() == blobs[table].tobytes()


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_needs_a_row_for_each_index(name: str) -> None:
    case = CASES[name]
    blobs = draw(case, 5, (3,))
    with pytest.raises(ShapeError, match=r"must have shape \(2, 3\) .* found \(1, 3\)"):
        run_case(case, blobs, [0, 1], gradients(blobs, [0], 1))
    with pytest.raises(ShapeError, match="must be one of int32, int64, found int16"):
        run_case(case, blobs, [0], gradients(blobs, [0], 1), dtype=np.int16)


@pytest.mark.parametrize("name", CASES)
def test_tables_must_be_updated_in_place(name: str) -> None:
    case = replace(CASES[name], outputs=CASES[name].outputs.replace("param", "other"))
    blobs = draw(case, 5, (3,))
    with pytest.raises(SchemaError, match="must overwrite input"):
        run_case(case, blobs, [0], gradients(blobs, [0], 1))


def test_the_step_of_momentum_may_overwrite_the_gradient() -> None:
    for deduplicate in (0, 1):
        case = CASES["nesterov"]
        blobs = draw(case, 5, (3,))
        grads = gradients(blobs, WITH_DUPLICATES, 1)
        apart = run_case(case, blobs, WITH_DUPLICATES, grads, deduplicate=deduplicate)
        same = replace(case, outputs="grad s0 param")
        result = run_case(same, blobs, WITH_DUPLICATES, grads, deduplicate=deduplicate)
        assert result["grad"].tobytes() == apart["e0"].tobytes()
        assert result["param"].tobytes() == apart["param"].tobytes()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=12))
def test_occurrences_are_grouped_by_rank_and_each_place_is_in_one_group(indices: list[int]) -> None:
    groups = [group.tolist() for group in occurrences(np.array(indices, np.int64))]
    assert sorted(place for group in groups for place in group) == list(range(len(indices)))
    for rank, group in enumerate(groups):
        assert all(indices[:place].count(indices[place]) == rank for place in group)
