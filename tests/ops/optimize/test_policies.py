"""Learning-rate policies against tables computed by hand, through the operator."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import arguments_of
from dagexec.errors import ArgumentError, SchemaError
from dagexec.ops.families.optimize.policies import (
    Alter,
    Composite,
    CompositeCosine,
    CompositeCyclical,
    ConstantThenLinearWarmup,
    ConstantWarmup,
    Cosine,
    Cyclical,
    Exp,
    Fixed,
    Gate,
    Hill,
    Inv,
    LinearWarmup,
    PieceWarmup,
    Policy,
    Poly,
    Slope,
    Stage,
    Step,
    policy_names,
    read_policy,
)
from tests.ops.optimize.updating import DEVICES, counter, run_steps
from tests.ops.running import operator_def

HALF = math.sqrt(0.5)

TABLES: list[tuple[Policy, dict[int, float]]] = [
    (Fixed(), {0: 1, 1: 1, 10**9: 1}),
    (Alter(2, 3), {0: 1, 1: 1, 2: 0, 4: 0, 5: 1, 6: 1, 7: 0, 9: 0, 10: 1}),
    (Alter(2, 3, active_first=False), {0: 0, 2: 0, 3: 1, 4: 1, 5: 0, 7: 0, 8: 1}),
    (Alter(0, 1), {0: 0, 1: 0, 2: 0}),
    (Step(3, 0.5), {0: 1, 2: 1, 3: 0.5, 5: 0.5, 6: 0.25, 9: 0.125}),
    (Step(1, 0.5), {0: 1, 1: 0.5, 2: 0.25}),
    (Exp(0.5), {0: 1, 1: 0.5, 3: 0.125}),
    (Exp(2.0), {0: 1, 10: 1024}),
    (Gate(0.25, 4.0, 2), {0: 0.25, 1: 0.25, 2: 4, 3: 4}),
    (Gate(0.25, 4.0), {0: 4}),
    (Inv(0.5, 2.0), {0: 1, 1: 1 / 2.25, 2: 0.25, 6: 0.0625}),
    (Inv(3.0, 0.5), {1: 0.5, 5: 0.25}),
    (Poly(2.0, 4), {0: 1, 1: 0.5625, 2: 0.25, 3: 0.0625, 4: 0, 5: 0, 100: 0}),
    (Poly(0.5, 4), {2: HALF, 3: 0.5, 5: 0}),
    (LinearWarmup(0.25, 3), {0: 0.25, 1: 0.5, 2: 0.75, 3: 1, 4: 1}),
    (LinearWarmup(), {0: 1}),
    (ConstantWarmup(0.125, 2), {0: 0.125, 1: 0.125, 2: 1}),
    (ConstantWarmup(), {0: 1}),
    (PieceWarmup(0.25, 2, 0.75, 4, 2.0), {0: 0.25, 1: 0.25, 2: 0.75, 3: 0.75, 4: 2, 9: 2}),
    (Hill(2, 1.0, 1.0, 0.5, 0.25), {0: 0.5, 1: 0.75, 2: 1, 3: 0.5, 4: 1 / 3, 5: 0.25, 6: 0.25, 60: 0.25}),
    (Slope(2, 6, 1.0, 0.5), {0: 1, 1: 1, 2: 1, 3: 0.875, 4: 0.75, 6: 0.5, 7: 0.5}),
    (Slope(1, 3, 0.5, 1.0), {0: 0.5, 1: 1, 2: 1, 3: 1, 4: 1.25}),
    (Cyclical(2, max_lr=0.5), {0: 1, 1: 3, 2: 5, 3: 3, 4: 1, 6: 5, 8: 1}),
    (Cyclical(2, max_lr=0.5, decay=0.5), {2: 5, 4: 1, 5: 2, 6: 3, 10: 2}),
    (Cosine(1.0, 0.0, 4, 1.0, 0.5), {0: 1, 1: (1 + HALF) / 2, 2: 0.5, 3: (1 - HALF) / 2, 4: 0.5, 6: 0.25, 8: 0.25}),
    (Cosine(1.0, 0.5, 2, 2.0, 1.0), {0: 1, 1: 0.75, 2: 1, 4: 0.75, 6: 1, 10: 0.75, 14: 1, 22: 0.75, 30: 1}),
    (Cosine(1.0, 0.0, 10, 3.0, 0.5), {9: (1 + math.cos(0.9 * math.pi)) / 2, 10: 0.5, 25: 0.25, 40: 0.25, 130: 0.125}),
    (Cosine(1.0, 0.0, 1, 3.0, 0.5), {0: 1, 1: 0.5, 4: 0.25, 40: 1 / 16, 121: 1 / 32}),
    (Cosine(), {0: 0.5, 25: 0.3, 50: 0.5 * 0.99, 75: 0.3 * 0.99}),
    (ConstantThenLinearWarmup(0.5, 2, 4), {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.625, 5: 0.875, 6: 1, 7: 1}),
    (ConstantThenLinearWarmup(), {0: 0.1, 10**7: 0.1, 15 * 10**6: 0.55}),
    (CompositeCyclical(0.5, 1, 2, 0.5, 2), {0: 0.5, 1: 0.5, 2: 0.75, 3: 1, 4: 3, 5: 5, 6: 3, 7: 1}),
    (CompositeCosine(0.5, 1, 2, 1.0, 0.0, 4, 1.0, 0.5), {0: 0.5, 1: 0.5, 2: 0.75, 3: 1, 5: 0.5, 7: 0.5, 9: 0.25}),
    (
        Composite((Stage(2, Fixed(), 0.5), Stage(3, Exp(0.5)), Stage(1, Step(2, 0.5), 2.0))),
        {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.125, 5: 1 / 32, 6: 0.25, 7: 0.25, 8: 0.125},
    ),
]
BASE = 0.1


def rates(policy: Policy, iterations: list[int], base_lr: float = BASE, device: str = "cpu") -> list[float]:
    """What the operator gives at each iteration."""
    found = []
    for iteration in iterations:
        blobs = {"iteration": counter(iteration)}
        arguments: dict[str, ArgumentValue] = {"base_lr": base_lr, **policy.arguments()}
        result = run_steps("LearningRate", ["iteration"], ["rate"], blobs, [{}], device=device, **arguments)
        assert result["rate"].dtype == np.float32
        assert result["rate"].shape == ()
        found.append(float(result["rate"]))
    return found


@pytest.mark.parametrize(("policy", "table"), TABLES, ids=lambda value: value.name if isinstance(value, Policy) else "")
def test_rates_are_those_of_the_table(policy: Policy, table: dict[int, float]) -> None:
    expected = [BASE * multiplier for multiplier in table.values()]
    np.testing.assert_allclose(rates(policy, list(table)), expected, rtol=1e-6, atol=1e-9)


def test_every_policy_is_in_the_table() -> None:
    assert {policy.name for policy, _ in TABLES} == set(policy_names())


@pytest.mark.parametrize(("policy", "table"), TABLES, ids=lambda value: value.name if isinstance(value, Policy) else "")
def test_a_negative_base_gives_negative_rates(policy: Policy, table: dict[int, float]) -> None:
    iterations = list(table)[:3]
    assert rates(policy, iterations, -BASE) == [-rate for rate in rates(policy, iterations)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_rate_follows_the_counter(device: str) -> None:
    fed = [{"iteration": counter(step)} for step in (0, 1, 2)]
    result = run_steps(
        "LearningRate", ["iteration"], ["rate"], fed[0], fed, device=device, base_lr=1.0, policy="exp", gamma=0.5
    )
    assert result["rate"] == 0.25


def test_arguments_say_the_policy_again() -> None:
    for policy, _ in TABLES:
        definition = operator_def("LearningRate", ["i"], ["r"], base_lr=BASE, **policy.arguments())
        again = read_policy(arguments_of(definition, "test"), "test")
        for iteration in range(12):
            assert again.multiplier(iteration, BASE) == pytest.approx(policy.multiplier(iteration, BASE), rel=1e-6)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(2, 5), st.integers(0, 400))
def test_cosine_cycles_begin_where_the_sum_of_their_lengths_says(period: int, factor: int, iteration: int) -> None:
    start, length, cycle = 0, period, 0
    while start + length <= iteration:
        start, length, cycle = start + length, length * factor, cycle + 1
    expected = 0.5**cycle * (0.1 + 0.45 * (1 + math.cos(math.pi * (iteration - start) / length)))
    policy = Cosine(1.0, 0.1, period, float(factor), 0.5)
    assert policy.multiplier(iteration, 1.0) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 3), st.floats(0.01, 3))
def test_steps_of_one_are_exponential_and_inverse_falls(iteration: int, gamma: float, power: float) -> None:
    assert Step(1, gamma).multiplier(iteration, 1.0) == Exp(gamma).multiplier(iteration, 1.0)
    assert Inv(gamma, power).multiplier(iteration + 1, 1.0) <= Inv(gamma, power).multiplier(iteration, 1.0) <= 1


def test_a_rate_too_large_for_float32_is_infinite() -> None:
    assert rates(Exp(2.0), [2000]) == [math.inf]


def infer(**arguments: ArgumentValue) -> None:
    """Prepare the operator, as a net does before it runs."""
    run_steps("LearningRate", ["iteration"], ["rate"], {"iteration": counter(1)}, [{}], **arguments)


def test_an_unknown_policy_is_refused_with_the_list_of_all() -> None:
    with pytest.raises(ArgumentError, match=r"'policy' must be one of alter, composite, .*step; found 'cosin'"):
        infer(base_lr=0.1, policy="cosin")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "step", "gamma": 0.5}, "policy 'step' needs argument 'stepsize'"),
        ({"policy": "step", "stepsize": 0, "gamma": 0.5}, "stepsize and gamma must be above 0; found stepsize=0"),
        ({"policy": "exp", "gamma": -0.5}, "gamma must be above 0; found gamma=-0.5"),
        ({"policy": "inv", "gamma": 0.5}, "policy 'inv' needs argument 'power'"),
        ({"policy": "inv", "gamma": 0.5, "power": 0.0}, "gamma and power must be above 0"),
        ({"policy": "poly", "power": 1.0, "max_iter": 0}, "power and max_iter must be above 0"),
        ({"policy": "alter", "active_period": -1, "inactive_period": 2}, "the periods must be at least 0"),
        ({"policy": "alter", "active_period": 0, "inactive_period": 0}, "one more than that"),
        ({"policy": "linearWarmup", "start_multiplier": -1.0}, "start_multiplier must be at least 0"),
        ({"policy": "constantWarmup", "multiplier": 0.0}, "the multiplier must be above 0"),
        ({"policy": "hill", "num_iter": 0, "gamma": 1.0, "power": 1.0}, "num_iter, gamma and power must be above 0"),
        (
            {"policy": "hill", "num_iter": 1, "gamma": 1.0, "power": 1.0, "end_multiplier": 1.5},
            r"start_multiplier and end_multiplier must be in \[0, 1\]",
        ),
        ({"policy": "slope", "num_iter_1": 3, "num_iter_2": 3}, "0 < num_iter_1 < num_iter_2"),
        ({"policy": "cyclical", "stepsize": 0}, "stepsize must be above 0"),
        ({"policy": "cosine", "max_lr": 0.1, "min_lr": 0.2}, "max_lr must be at least min_lr"),
        ({"policy": "cosine", "period": 0}, "period must be above 0"),
        ({"policy": "cosine", "t_mult": 0.5}, "t_mult must be at least 1"),
        ({"policy": "compositeCosine", "cosine_period": 0}, "period must be above 0"),
        ({"policy": "compositeCyclical", "cyclical_step_size": 0}, "stepsize must be above 0"),
        ({"policy": "constantThenLinearWarmup", "start_warmup_multiplier": -1.0}, "must be at least 0"),
        ({"policy": "composite"}, "expected at least one stage"),
        ({"policy": "composite", "sub_policy_num_iters": [3]}, "'sub_policy_0_policy' must be one of"),
        (
            {"policy": "composite", "sub_policy_num_iters": [0], "sub_policy_0_policy": "fixed"},
            "every num_iter must be above 0",
        ),
        (
            {"policy": "composite", "sub_policy_num_iters": [3], "sub_policy_0_policy": "composite"},
            "'sub_policy_0_policy' must not be composite",
        ),
        (
            {"policy": "composite", "sub_policy_num_iters": [3], "sub_policy_0_policy": "exp"},
            "policy 'exp' needs argument 'sub_policy_0_gamma'",
        ),
    ],
    ids=lambda value: "",
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, ArgumentValue], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        infer(base_lr=0.1, **arguments)


def test_the_base_rate_is_required_and_must_not_be_zero_for_cycles() -> None:
    with pytest.raises(SchemaError, match="argument 'base_lr' is required"):
        infer(policy="fixed")
    with pytest.raises(ArgumentError, match="base_lr must not be 0"):
        infer(base_lr=0.0, policy="cyclical", stepsize=3)


def test_a_composite_stage_of_its_own_kind_is_refused_in_python_too() -> None:
    with pytest.raises(ArgumentError, match="a stage must not be composite"):
        Composite((Stage(1, Composite((Stage(1, Fixed()),))),))
