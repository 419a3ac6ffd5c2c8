"""Update rules on dense gradients, several steps, against one-element formulas in Python's floats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.gradient import gradient
from dagexec.errors import ArgumentError, DagexecError, GradientError, SchemaError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.memory_limits import peak_memory
from tests.ops.optimize import formulas
from tests.ops.optimize.updating import DEVICES, Array, Formula, counter, each_element, run_steps, scalar
from tests.ops.running import operator_def


@dataclass(frozen=True)
class Case:
    """An operator with arguments, and what it should do.

    Attributes:
        inputs: with the names param, s0, s1, grad, rate, iteration.
        outputs: in place where a name is that of an input; e0 and e1 are extra outputs.
        formula: for one element.
        arguments: the operator's.
        pairs: the state has two numbers an element.
        rates: the learning rate of each step.
    """

    type: str
    inputs: str
    outputs: str
    formula: Formula
    arguments: Mapping[str, ArgumentValue] = field(default_factory=dict)
    pairs: bool = False
    rates: tuple[float, ...] = (-0.1, -0.05, -0.07)

    @property
    def states(self) -> list[str]:
        """The names of the state."""
        return [name for name in self.inputs.split() if name.startswith("s")]

    @property
    def extras(self) -> list[str]:
        """The names of the extra outputs."""
        return [name for name in self.outputs.split() if name.startswith("e")]


ADAM = "param s0 s1 grad rate iteration"
POSITIVE = (0.1, 0.05, 0.07)
CASES = {
    "momentum": Case(
        "MomentumSGDUpdate", "grad s0 rate param", "e0 s0 param", formulas.momentum(0.9, False), {"momentum": 0.9},
        rates=POSITIVE,
    ),
    "nesterov": Case(
        "MomentumSGDUpdate", "grad s0 rate param", "e0 s0 param", formulas.momentum(0.75, True),
        {"momentum": 0.75, "nesterov": 1}, rates=POSITIVE,
    ),
    "no momentum": Case(
        "MomentumSGDUpdate", "grad s0 rate param", "e0 s0 param", formulas.momentum(0.0, False), rates=POSITIVE
    ),
    "adagrad": Case("Adagrad", "param s0 grad rate", "param s0", formulas.adagrad(1e-5)),
    "adagrad rate": Case("Adagrad", "param s0 grad rate", "param s0 e0", formulas.adagrad(0.5), {"epsilon": 0.5}),
    "adagrad all": Case(
        "Adagrad", "param s0 grad rate", "param s0 e0 e1", formulas.adagrad(0.125, 0.5),
        {"epsilon": 0.125, "decay": 0.5},
    ),
    "adam": Case("Adam", ADAM, "param s0 s1", formulas.adam(0.9, 0.999, 1e-5)),
    "adam step": Case(
        "Adam", ADAM, "param s0 s1 e0", formulas.adam(0.5, 0.75, 0.25), {"beta1": 0.5, "beta2": 0.75, "epsilon": 0.25}
    ),
    "adam decay": Case(
        "Adam", ADAM, "param s0 s1", formulas.adam(0.9, 0.999, 1e-5, 0.25), {"decoupled_weight_decay": 0.25}
    ),
    "adadelta": Case("Adadelta", "param s0 s1 grad rate", "param s0 s1", formulas.adadelta(0.95, 1e-5)),
    "adadelta arguments": Case(
        "Adadelta", "param s0 s1 grad rate", "param s0 s1", formulas.adadelta(0.5, 0.25),
        {"decay": 0.5, "epsilon": 0.25},
    ),
    "ftrl": Case(
        "Ftrl", "param s0 grad", "param s0", formulas.ftrl(0.005, 1.0, 0.001, 0.001), pairs=True
    ),
    "ftrl arguments": Case(
        "Ftrl", "param s0 grad", "param s0", formulas.ftrl(0.25, 0.5, 0.75, 0.125),
        {"alpha": 0.25, "beta": 0.5, "lambda1": 0.75, "lambda2": 0.125}, pairs=True,
    ),
    "ftrl alpha": Case(
        "Ftrl", "param s0 grad rate", "param s0", formulas.ftrl(None, 0.5, 0.5, 0.125),
        {"alpha": 9.0, "beta": 0.5, "lambda1": 0.5, "lambda2": 0.125}, pairs=True, rates=POSITIVE,
    ),
}  # fmt: skip
STEP_CASES = {
    "momentum": Case(
        "MomentumSGD", "grad s0 rate", "e0 s0", formulas.momentum(0.9, False), {"momentum": 0.9}, rates=POSITIVE
    ),
    "nesterov": Case(
        "MomentumSGD", "grad s0 rate", "e0 s0", formulas.momentum(0.9, True), {"momentum": 0.9, "nesterov": 1},
        rates=POSITIVE,
    ),
    "rms": Case("RmsProp", "grad s0 s1 rate", "e0 s0 s1", formulas.rms_prop(0.9, 0.0, 1e-5)),
    "rms momentum": Case(
        "RmsProp", "grad s0 s1 rate", "e0 s0 s1", formulas.rms_prop(0.5, 0.75, 0.125),
        {"decay": 0.5, "momentum": 0.75, "epsilon": 0.125}, rates=POSITIVE,
    ),
}  # fmt: skip
ALL = {**CASES, **{f"step: {name}": case for name, case in STEP_CASES.items()}}


def draw(case: Case, shape: tuple[int, ...], dtype: type, seed: int = 0) -> tuple[dict[str, Array], list[Array]]:
    """First values of parameter and state, and the gradients of all steps."""
    rng = np.random.default_rng(seed)
    blobs = {"param": rng.standard_normal(shape).astype(dtype)}
    for name in case.states:
        size = (*shape, 2) if case.pairs else shape
        blobs[name] = rng.uniform(0.1, 1, size).astype(dtype)
    return blobs, [rng.standard_normal(shape).astype(dtype) for _ in case.rates]


def run_case(
    case: Case,
    blobs: Mapping[str, Array],
    grads: list[Array],
    outputs: str = "",
    device: str = "cpu",
) -> dict[str, Array]:
    """What the case's operator leaves behind; by default under the case's output names."""
    fed = [
        {"grad": grad, "rate": scalar(rate), "iteration": counter(iteration)}
        for iteration, (grad, rate) in enumerate(zip(grads, case.rates, strict=True), 1)
    ]
    first = {**blobs, **fed[0]}
    names = (outputs or case.outputs).split()
    return run_steps(case.type, case.inputs.split(), names, first, fed, device=device, **case.arguments)


def compare(
    case: Case, result: Mapping[str, Array], blobs: Mapping[str, Array], grads: list[Array], tol: float
) -> None:
    """Check what the operator left behind against the formula."""
    state = [blobs[name] for name in case.states]
    param, states, extras = each_element(case.formula, blobs["param"], state, grads, case.rates)
    expected = {"param": param, **dict(zip(case.states, states, strict=True))}
    expected |= dict.fromkeys(case.extras, param) if param.size == 0 else dict(zip(case.extras, extras, strict=False))
    assert result.keys() <= expected.keys()
    for name, array in result.items():
        assert array.dtype == blobs["param"].dtype
        np.testing.assert_allclose(array, expected[name], rtol=tol, atol=tol, err_msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ALL)
def test_three_steps_follow_the_formula(name: str, device: str) -> None:
    case = ALL[name]
    blobs, grads = draw(case, (3, 5), np.float32)
    compare(case, run_case(case, blobs, grads, device=device), blobs, grads, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_float64_parameters_take_a_float32_rate(name: str) -> None:
    case = ALL[name]
    blobs, grads = draw(case, (7,), np.float64)
    compare(case, run_case(case, blobs, grads), blobs, grads, 1e-6)


def is_exact(value: ArgumentValue) -> bool:
    """Whether a value stays what it is as the float32 of an argument."""
    return not isinstance(value, float) or float(np.float32(value)) == value


EXACT = [name for name, case in ALL.items() if len(case.arguments) > 1 and all(map(is_exact, case.arguments.values()))]


@pytest.mark.parametrize("name", EXACT)
def test_float64_is_computed_in_float64(name: str) -> None:
    case = replace(ALL[name], rates=(0.5, 0.25, 0.125))
    blobs, grads = draw(case, (6,), np.float64)
    compare(case, run_case(case, blobs, grads), blobs, grads, 1e-12)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(ALL)), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 99))
def test_any_shape_follows_the_formula(name: str, shape: list[int], seed: int) -> None:
    case = ALL[name]
    blobs, grads = draw(case, tuple(shape), np.float64, seed)
    compare(case, run_case(case, blobs, grads), blobs, grads, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_tensors_of_several_pieces_are_updated_throughout(name: str) -> None:
    case = ALL[name]
    blobs, grads = draw(case, (4, 12_000), np.float32)
    whole = run_case(case, blobs, grads)
    for row in range(4):
        small = {key: array[row] for key, array in blobs.items()}
        part = run_case(case, small, [grad[row] for grad in grads])
        assert all(array.tobytes() == whole[key][row].tobytes() for key, array in part.items())


@pytest.mark.parametrize("name", ALL)
def test_a_step_may_leave_its_inputs_as_they_are(name: str) -> None:
    case = ALL[name]
    blobs, grads = draw(case, (4,), np.float32)
    case_one = replace(case, rates=case.rates[:1])
    apart = " ".join(f"new_{output}" for output in case.outputs.split())
    result = run_case(case_one, blobs, grads[:1], outputs=apart)
    inside = run_case(case_one, blobs, grads[:1])
    for key, array in inside.items():
        assert array.tobytes() == result[f"new_{key}"].tobytes()


@pytest.mark.parametrize("name", ["momentum", "nesterov", "step: nesterov", "step: rms momentum"])
def test_the_step_may_overwrite_the_gradient(name: str) -> None:
    case = ALL[name]
    blobs, grads = draw(case, (4,), np.float32)
    result = run_case(case, blobs, grads, outputs=case.outputs.replace("e0", "grad"))
    expected = run_case(case, blobs, grads)
    assert result["grad"].tobytes() == expected["e0"].tobytes()
    assert all(result[key].tobytes() == array.tobytes() for key, array in expected.items() if key != "e0")


def test_ftrl_leaves_small_parameters_at_zero() -> None:
    arguments: dict[str, ArgumentValue] = {"alpha": 0.5, "beta": 1.0, "lambda1": 2.0, "lambda2": 0.0}
    blobs = {"param": np.array([1.0, 1.0], np.float32), "s0": np.zeros((2, 2), np.float32)}
    fed = {"grad": np.array([1.0, 9.0], np.float32)}
    result = run_steps("Ftrl", ["param", "s0", "grad"], ["param", "s0"], {**blobs, **fed}, [fed], **arguments)
    assert result["param"][0] == 0
    assert result["param"][1] != 0


def test_ftrl_without_any_gradient_is_zero_even_where_nothing_keeps_the_divisor_from_zero() -> None:
    arguments: dict[str, ArgumentValue] = {"alpha": 0.5, "beta": 0.0, "lambda1": 0.0, "lambda2": 0.0}
    blobs = {"param": np.ones(2, np.float32), "s0": np.zeros((2, 2), np.float32), "grad": np.zeros(2, np.float32)}
    result = run_steps("Ftrl", ["param", "s0", "grad"], ["param", "s0"], blobs, [{}], **arguments)
    assert result["param"].tolist() == [0, 0]


def test_not_a_number_stays_where_it_is() -> None:
    for case in ALL.values():
        blobs, grads = draw(case, (3,), np.float32)
        grads[0][1] = np.nan
        result = run_case(case, blobs, grads)
        for array in result.values():
            assert np.isnan(array).reshape(3, -1).all(axis=1).tolist() in ([False, True, False], [False] * 3)
            assert np.isfinite(array[[0, 2]]).all()


@pytest.mark.slow
def test_runs_allocate_nothing_of_the_size_of_the_tensor() -> None:
    size = 200_000
    for case in ALL.values():
        blobs, grads = draw(case, (size,), np.float32)
        definition = operator_def(case.type, case.inputs.split(), case.outputs.split(), **case.arguments)
        workspace = Workspace()
        extra = {"grad": grads[0], "rate": scalar(0.1), "iteration": counter(1)}
        for name, array in {**blobs, **extra}.items():
            workspace.feed_blob(name, array)
        with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
            net.run()
            peak = peak_memory(net.run)
        assert peak < size, case.type


@pytest.mark.parametrize("name", ALL)
def test_shapes_and_types_that_do_not_fit_are_refused(name: str) -> None:
    case = ALL[name]
    blobs, grads = draw(case, (3,), np.float32)
    others = {"rate": scalar(0.1), "iteration": counter(1), "grad": grads[0]}
    good = {key: {**blobs, **others}[key] for key in case.inputs.split()}
    for key, bad, message in [
        ("grad", np.zeros(4, np.float32), r"must have shape .* found \(4,\)|must have shape .* found \(3,\)"),
        ("s0", np.zeros((1, 3), np.float32), "must have shape"),
        ("s0", np.zeros_like(blobs["s0"], np.float64), "must share one element type"),
        ("grad", np.zeros(3, np.float16), "must be one of float32, float64|must share one element type"),
        ("rate", np.zeros(2, np.float32), r"must have one element, found shape \(2,\)"),
        ("rate", np.zeros(1, np.int32), "must be one of float32, float64, found int32"),
        ("iteration", np.zeros(1, np.int32), "must be one of int64, found int32"),
    ]:
        if key in good:
            with pytest.raises(ShapeError, match=message):
                run_steps(case.type, case.inputs.split(), case.outputs.split(), {**good, key: bad}, [{}])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("momentum", {"momentum": -0.5}, r"'momentum' must be in \[0, inf\), found -0.5"),
        ("adagrad", {"epsilon": -1.0}, r"'epsilon' must be in \[0, inf\], found -1"),
        ("adagrad", {"decay": -1.0}, r"'decay' must be in \[0, inf\)"),
        ("adam", {"beta1": 1.0}, r"'beta1' must be in \[0, 1\), found 1"),
        ("adam", {"beta2": -0.5}, r"'beta2' must be in \[0, 1\)"),
        ("adam", {"decoupled_weight_decay": -0.5}, "'decoupled_weight_decay' must be in"),
        ("adadelta", {"decay": 0.0}, r"'decay' must be in \(0, 1\), found 0"),
        ("step: rms", {"decay": 1.5}, r"'decay' must be in \[0, 1\], found 1.5"),
        ("ftrl", {"alpha": 0.0}, r"'alpha' must be in \(0, inf\), found 0"),
        ("ftrl", {"lambda1": -1.0}, "'lambda1' must be in"),
        ("adam", {"epsilon": float("nan")}, "'epsilon' is not a number"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(name: str, arguments: dict[str, ArgumentValue], message: str) -> None:
    case = ALL[name]
    blobs, grads = draw(case, (3,), np.float32)
    with pytest.raises(ArgumentError, match=message):
        run_case(replace(case, arguments=arguments), blobs, grads)


def test_adam_refuses_a_negative_iteration() -> None:
    blobs, grads = draw(CASES["adam"], (3,), np.float32)
    first = {**blobs, "grad": grads[0], "rate": scalar(0.1), "iteration": counter(-1)}
    with pytest.raises(DagexecError, match="the iteration must be at least 0, found -1"):
        run_steps("Adam", ADAM.split(), ["param", "s0", "s1"], first, [{}])


def test_an_output_may_not_overwrite_another_input() -> None:
    blobs, grads = draw(CASES["adam"], (3,), np.float32)
    with pytest.raises(SchemaError, match="may not overwrite input 3"):
        run_case(CASES["adam"], blobs, grads, outputs="grad s0 s1")


@pytest.mark.parametrize("name", ALL)
def test_updates_have_no_gradient(name: str) -> None:
    case = ALL[name]
    definition = operator_def(case.type, case.inputs.split(), case.outputs.split(), **case.arguments)
    with pytest.raises(GradientError, match="it changes parameters after the gradients are known"):
        gradient(definition, ["dy"] * len(definition.output))
