"""The benchmark on CUDA devices: its logic, on emulated ones."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dagexec.core.device import Device
from tests.cuda.emulated import emulated, has_gpu


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark's script."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return import_module("cuda_networks")


@pytest.mark.slow
def test_it_runs_to_its_end_on_emulated_devices_and_says_that_it_measures_nothing(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    assert benchmark.main(["--devices", "emulated", "--quick", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert "emulated" in found["note"]
    assert found["versions"]["device"] == "emulated device"
    [case] = found["cases"]
    assert set(case["contenders"]) == set(benchmark.OURS)
    assert all(row["milliseconds"] > 0 and row["over_floor"] > 0 for row in case["contenders"].values())
    assert found["launch_microseconds"] > 0


@pytest.mark.usefixtures("benchmark")
def test_the_cost_of_launching_is_measured_without_a_driver() -> None:
    found = import_module("cuda_launch_cost").measure(operators=40, repeat=2)
    assert list(found) == ["call", "step", "launch", "chain", "branches", "replay"]
    assert all(0 < row["least_us"] <= row["median_us"] for row in found.values())
    assert found["branches"]["operators"] >= 34


@pytest.mark.skipif(has_gpu(), reason="there is a device")
def test_without_a_device_it_measures_nothing_and_says_what_to_install(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    assert benchmark.main(["--quick"]) == 1
    assert "nothing is measured: CuPy cannot be imported" in capsys.readouterr().err


def test_what_differs_is_not_timed_and_ratios_are_within_rounds(benchmark: ModuleType) -> None:
    wanted = np.array([1.0, 2.0])
    contenders = {"dag": lambda: wanted, "torch eager": lambda: wanted, "simple": lambda: wanted + 0.1}
    found = benchmark.measure(contenders, wanted, 1e-3, rounds=2, seconds=0.001)
    assert "milliseconds" not in found["simple"]
    assert "differs by 5.00e-02" in found["simple"]["refused"]
    assert found["dag"]["ratio"]["torch eager"] > 0
    assert "torch eager" not in found["torch eager"]["ratio"]


@pytest.mark.slow
def test_the_floor_counts_arithmetic_and_bytes(benchmark: ModuleType) -> None:
    with emulated(record=False):
        slow = benchmark.floor_of("lenet", 1, "float32", "cuda:0", {"operations_a_second": 1e6, "bytes_a_second": 1e12})
        fast = benchmark.floor_of("lenet", 1, "float32", "cuda:0", {"operations_a_second": 2e6, "bytes_a_second": 1e12})
        assert slow == pytest.approx(2 * fast, rel=0.01)
        assert benchmark.launch_microseconds(Device("cuda", 0), 10) > 0


def test_the_page_shows_what_was_recorded() -> None:
    root = Path(__file__).parents[1]
    cases = json.loads((root / "benchmarks" / "results" / "cuda.json").read_text())["cases"]
    contenders = ("simple", "dag", "async_dag", "async_dag captured", "torch eager", "torch CUDA graph")
    recorded = []
    for case in cases:
        rows = case["contenders"]
        ratios = (rows["async_dag captured"]["ratio"]["torch CUDA graph"], rows["async_dag"]["ratio"]["torch eager"])
        figures = [f"{figure:.2f}" for figure in (*(rows[name]["milliseconds"] for name in contenders), *ratios)]
        kind = f"{case['batch']}, {case['dtype']}"
        recorded.append(" | ".join([case["network"], kind, *figures, f"{case['floor_milliseconds']:.3f}"]))
    page = (root / "docs" / "cuda.md").read_text()
    assert re.findall(r"^\| (\w+ \| \d+, float.*) \|$", page, re.MULTILINE) == recorded
