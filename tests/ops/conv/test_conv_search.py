"""exhaustive_search: what is measured once is kept, saved and loaded; deterministic=1 measures nothing."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dagexec.core.arguments import ArgumentValue
from dagexec.core.choices import choices
from dagexec.core.operator import Step
from dagexec.errors import ModelFormatError, ResourceError
from dagexec.ops.families.conv import search
from dagexec.ops.families.conv.choice import ENGINES
from dagexec.ops.families.conv.problem import ConvProblem
from tests.ops.running import Array, operator_def, run_operator, workspace_of

RNG = np.random.default_rng(4)
X, FILTER = RNG.normal(size=(2, 8, 12, 12)).astype(np.float32), RNG.normal(size=(6, 8, 3, 3)).astype(np.float32)
Measure = Callable[[dict[str, Step]], dict[str, float]]


class Clock:
    """Stands for `measure`: gives each algorithm a time that the test sets, and counts the measurements."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.asked: list[list[str]] = []

    def __call__(self, steps: dict[str, Step]) -> dict[str, float]:
        self.asked.append(sorted(steps))
        for step in steps.values():
            step()
        return {name: self.times.get(name, 1.0) for name in steps}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(search, "measure", clock)
    choices.forget()
    yield clock
    choices.forget()


def convolve(engine: str = "", x: Array = X, **arguments: int) -> bytes:
    (y,) = run_operator("Conv", [x, FILTER], kernel=3, pad=1, engine=engine, **arguments)
    return y.tobytes()


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_the_fastest_algorithm_computes(clock: Clock, engine: str) -> None:
    clock.times[engine] = 0.5
    assert convolve(exhaustive_search=1) == convolve(engine)
    assert clock.asked == [["DEFAULT", "DIRECT", "FFT", "WINOGRAD"]]
    assert list(choices.all().values()) == [engine]


def test_a_gain_within_the_noise_of_measuring_is_none(clock: Clock) -> None:
    clock.times["WINOGRAD"] = 0.94
    assert convolve(exhaustive_search=1) == convolve()
    assert list(choices.all().values()) == ["DEFAULT"]


def test_only_the_algorithms_that_apply_are_measured(clock: Clock) -> None:
    run_operator("Conv", [X, FILTER], kernel=3, stride=2, exhaustive_search=1)
    assert clock.asked == [["DEFAULT", "DIRECT", "FFT"]]


def test_every_geometry_is_measured_once(clock: Clock) -> None:
    for _ in range(2):
        convolve(exhaustive_search=1)
        convolve(exhaustive_search=1, x=X[:1])  # one image of the same sizes
        convolve(exhaustive_search=1, batch_invariant=0)
        run_operator("Conv", [X, FILTER], kernel=3, exhaustive_search=1)
        run_operator("Conv", [X, FILTER], kernel=3, pad=1, ws_nbytes_limit=1 << 20, exhaustive_search=1)
        run_operator("Conv", [X.astype(np.float64), FILTER.astype(np.float64)], kernel=3, pad=1, exhaustive_search=1)
    assert len(clock.asked) == len(choices.all()) == 5


CUBE, CUBES = RNG.normal(size=(1, 4, 4, 4)).astype(np.float16), RNG.normal(size=(4, 4, 3, 3)).astype(np.float16)
BASE: dict[str, ArgumentValue] = {"kernel": 3, "pads": [1, 1, 1, 1]}
OTHER_WORK: dict[str, dict[str, ArgumentValue]] = {
    "pads": {"pads": [2, 2, 0, 0]},
    "strides": {"strides": [1, 2]},
    "dilations": {"dilations": [2, 1]},
    "limit": {"ws_nbytes_limit": 1 << 20},
    "arithmetic": {"float16_compute": 1},
}


def search_with(weights: Array, constant: bool = False, **arguments: ArgumentValue) -> None:
    workspace = workspace_of({"x": CUBE, "w": weights})
    if constant:
        workspace.get_blob("w").tensor().freeze()
    workspace.run_operator_once(operator_def("Conv", ["x", "w"], ["y"], **arguments, exhaustive_search=1))


@pytest.mark.parametrize("arguments", OTHER_WORK.values(), ids=OTHER_WORK)
def test_other_work_on_arrays_of_the_same_shapes_is_measured_by_itself(
    clock: Clock, arguments: dict[str, ArgumentValue]
) -> None:
    for _ in range(2):
        search_with(CUBES, **BASE)
        search_with(CUBES, **{**BASE, **arguments})
    assert len(clock.asked) == len(choices.all()) == 2


def test_layouts_and_constant_filters_are_measured_by_themselves(clock: Clock) -> None:
    """The arrays have the same shapes in both layouts."""
    weights = RNG.normal(size=(4, 4, 4, 4)).astype(np.float16)
    for _ in range(2):
        for order in ("NCHW", "NHWC"):
            for constant in (False, True):
                search_with(weights, constant, kernel=4, order=order)
    assert len(clock.asked) == len(choices.all()) == 4


def test_candidates_are_measured_with_the_bias_and_with_filters_kept_as_in_the_run(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    seen: list[ConvProblem] = []
    trial = search._trial

    def watched(problem: ConvProblem) -> ConvProblem:
        seen.extend((problem, trial(problem)))
        return seen[-1]

    monkeypatch.setattr(search, "_trial", watched)
    run_operator("Conv", [X, FILTER, FILTER[:, 0, 0, 0]], kernel=3, exhaustive_search=1)
    search_with(CUBES, constant=True, **BASE)
    search_with(CUBES, **BASE)
    for problem, other in zip(seen[::2], seen[1::2], strict=True):
        assert (other.bias is None) == (problem.bias is None)
        assert (other.constant is None) == (problem.constant is None)
        assert other.constant is None or other.constant is not problem.constant
        for name in ("x", "weights", "y"):
            assert not np.shares_memory(getattr(problem, name), getattr(other, name))
    assert [problem.bias is not None for problem in seen[::2]] == [True, False, False]
    assert [problem.constant is not None for problem in seen[::2]] == [False, True, False]


def test_an_engine_that_is_named_is_not_searched_for(clock: Clock) -> None:
    convolve("FFT", exhaustive_search=1)
    assert clock.asked == []


def test_gradients_and_transposed_convolutions_search_too(clock: Clock) -> None:
    clock.times["DIRECT"] = 0.1
    run_operator("ConvTranspose", [X, FILTER.swapaxes(0, 1).copy()], kernel=3, exhaustive_search=1)
    y = np.zeros((2, 6, 10, 10), np.float32)
    run_operator("ConvGradient", [X, FILTER, y], 3, kernel=3, exhaustive_search=1)
    assert len(clock.asked) == 2


def test_deterministic_measures_nothing_and_uses_what_was_loaded(clock: Clock, tmp_path: Path) -> None:
    clock.times["WINOGRAD"] = 0.1
    assert convolve(exhaustive_search=1, deterministic=1) == convolve()
    assert clock.asked == []
    convolve(exhaustive_search=1)
    assert convolve(exhaustive_search=1, deterministic=1) == convolve(), "what was measured does not count"
    assert choices.save(tmp_path / "choices.json") == 1
    choices.forget()
    assert choices.load(tmp_path / "choices.json") == 1
    assert convolve(exhaustive_search=1, deterministic=1) == convolve("WINOGRAD")
    assert convolve(exhaustive_search=1) == convolve("WINOGRAD")
    assert len(clock.asked) == 1


def test_an_algorithm_that_is_unknown_here_leaves_the_default(clock: Clock, tmp_path: Path) -> None:
    convolve(exhaustive_search=1)
    path = tmp_path / "choices.json"
    choices.save(path)
    path.write_text(path.read_text().replace("DEFAULT", "MAGIC"))
    choices.forget()
    choices.load(path)
    assert convolve(exhaustive_search=1) == convolve()
    assert len(clock.asked) == 1


def test_loaded_choices_go_before_measured_ones(clock: Clock, tmp_path: Path) -> None:
    clock.times["WINOGRAD"] = 0.1
    convolve(exhaustive_search=1)
    path = tmp_path / "choices.json"
    choices.save(path)
    path.write_text(path.read_text().replace("WINOGRAD", "FFT"))
    choices.load(path)
    assert convolve(exhaustive_search=1) == convolve("FFT")


def test_two_threads_that_measure_at_once_end_with_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    choices.forget()
    both = threading.Barrier(2)
    winners = iter([{"WINOGRAD": 0.1}, {"FFT": 0.1}])

    def measure(steps: dict[str, Step]) -> dict[str, float]:
        both.wait(30)
        times = next(winners)
        return {name: times.get(name, 1.0) for name in steps}

    monkeypatch.setattr(search, "measure", measure)
    results: list[bytes] = []

    def run() -> None:
        workspace = workspace_of({"x": X, "w": FILTER})
        workspace.run_operator_once(operator_def("Conv", ["x", "w"], ["y"], kernel=3, pad=1, exhaustive_search=1))
        results.append(workspace.fetch_blob("y").tobytes())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (choice,) = choices.all().values()
    assert results == [convolve(choice)] * 2
    choices.forget()


def test_measuring_runs_each_candidate_and_drops_the_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"quick": 0, "as quick": 0, "slow": 0}
    now = 0.0

    def lasting(name: str, seconds: float) -> Step:
        def step() -> None:
            nonlocal now
            runs[name] += 1
            now += seconds

        return step

    monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=lambda: now))
    steps = {"quick": lasting("quick", 0.002), "slow": lasting("slow", 0.03), "as quick": lasting("as quick", 0.003)}
    assert search.measure(steps) == pytest.approx({"quick": 0.002, "slow": 0.03, "as quick": 0.003})
    assert runs["slow"] == 2
    assert runs["quick"] == runs["as quick"] > 5


BROKEN = {
    "not JSON": ("{", "cannot be read"),
    "another file": ('{"choices": {}}', "expected a file of dagexec choices, version 1"),
    "a list": (json.dumps({"format": "dagexec choices", "version": 1, "choices": [["a"]]}), "must map keys to names"),
    "too deep": ("[" * 100_000, "cannot be read"),
    "nested": (json.dumps({"format": "dagexec choices", "version": 1, "choices": {"a": []}}), "must map keys to names"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "choices.json"
    path.write_text(content)
    with pytest.raises(ModelFormatError, match=f"choices.json.*{message}"):
        choices.load(path)
    assert choices.all() == {}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"nowhere\.json"):
        choices.load(tmp_path / "nowhere.json")


def test_an_engine_that_does_not_apply_is_passed_over_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dagexec"):
        (y,) = run_operator("Conv", [X, FILTER], kernel=3, stride=2, engine="WINOGRAD")
    (expected,) = run_operator("Conv", [X, FILTER], kernel=3, stride=2)
    assert y.tobytes() == expected.tobytes()
    assert any("Conv 'y0'" in line and "WINOGRAD skipped: " in line for line in caplog.messages)


@pytest.mark.slow
def test_a_limit_below_one_column_is_an_error_with_the_numbers() -> None:
    x, weights = np.tile(X, (1, 64, 1, 1)), np.tile(FILTER, (1, 64, 1, 1))
    run_operator("Conv", [x, weights], kernel=3, ws_nbytes_limit=18_432)
    with pytest.raises(
        ResourceError,
        match=r"Conv 'y0'.*one window takes 18,432 bytes, more than ws_nbytes_limit 18,431; without columns: ",
    ):
        run_operator("Conv", [x, weights], kernel=3, ws_nbytes_limit=18_431)


@pytest.mark.slow
def test_dilation_too_far_for_columns_is_summed_tap_by_tap(caplog: pytest.LogCaptureFixture) -> None:
    x = RNG.integers(-3, 4, (1, 2, 2500, 2500)).astype(np.float32)
    weights = RNG.integers(-3, 4, (1, 2, 3, 3)).astype(np.float32)
    with caplog.at_level(logging.INFO, "dagexec"):
        (y,) = run_operator("Conv", [x, weights], kernel=3, dilation=1249, pad=1, ws_nbytes_limit=8 << 20)
    expected = sum(
        np.einsum(
            "c,cij->ij",
            weights[0, :, i, j],
            np.pad(x[0], ((0, 0), (1, 1), (1, 1)))[:, i * 1249 :, j * 1249 :][:, :4, :4],
        )
        for i in range(3)
        for j in range(3)
    )
    np.testing.assert_array_equal(y[0, 0], expected)
    assert any("the taps are summed one after another (DIRECT)" in line for line in caplog.messages)
