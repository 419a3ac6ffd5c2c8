"""The benchmark of tiny nets measures what it says, and compares results."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark's script."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return import_module("tiny")


@pytest.mark.parametrize("name", ["lenet", "perceptron", "elementwise"])
def test_a_net_is_measured_on_both_sides(name: str, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "_RUNS", 2)
    result = tiny.measure(name, rounds=2)
    assert result["ratio"] > 0
    assert result["largest_difference"] <= tiny.TOLERANCE
    times = result["microseconds"]
    assert all(value > 0 for side in tiny.SIDES for value in times[side].values())
    assert all(result["best"][side] in times[side] for side in tiny.SIDES)


def test_a_result_that_differs_is_no_measurement(tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "dagexec_calls", lambda *_: {"run": lambda: [np.zeros((1, tiny.WIDTH), np.float32)]})
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        tiny.measure("perceptron", rounds=1)


def test_the_nets_are_as_large_as_is_said(tiny: ModuleType) -> None:
    counts = {name: len(build().graph.node) for name, build in tiny.MODELS.items()}
    assert counts["perceptron"] == 19  # 10 layers, ReLU between them
    assert counts["elementwise"] == 200
