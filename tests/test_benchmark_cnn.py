"""The benchmark of whole networks works: its rounds, its page and plot, and its refusal of wrong results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import dagexec
from dagexec import zoo

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules beside the benchmark's script can be imported, as they can from the script."""
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a quick run on a tiny network writes."""
    file = tmp_path_factory.mktemp("cnn") / "cnn.json"
    command = [sys.executable, BENCHMARKS / "cnn.py", "--quick", "--no-torch", "--models", "lenet", "--json", file]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "lenet, batch 1, 1 threads" in result.stdout
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.slow
def test_a_row_has_times_ratios_the_floor_and_how_far_results_are_apart(report: dict[str, Any]) -> None:
    row = report["latencies"][0]
    times = row["times"]
    assert {"dagexec", "onnxruntime"} <= times.keys()
    assert all(0 < time["least"] <= time["milliseconds"] for time in times.values())
    assert times["onnxruntime"]["difference"] == 0
    assert times["dagexec"]["difference"] < 1e-5
    assert 0.1 < row["ratios"]["onnxruntime"] / (
        times["dagexec"]["milliseconds"] / times["onnxruntime"]["milliseconds"]
    ) < 10  # fmt: skip
    convolutions = 20 * 25 * 24 * 24 + 50 * 20 * 25 * 8 * 8
    products = 800 * 500 + 500 * 10
    assert row["gflop"] == pytest.approx(2e-9 * (convolutions + products), rel=0.05)
    assert row["floor_ms"] > 0


@pytest.mark.slow
def test_the_page_judges_by_the_worse_of_the_two_ratios(benchmark_modules: None, tmp_path: Path) -> None:
    from cnn_page import better_ratio, page, write_page

    time = {"milliseconds": 8.0, "tried": {}, "setting": {}, "chosen": {}}
    row = {
        "model": "resnet50", "batch": 1, "threads": 2, "gflop": 7.7, "floor_ms": 4.0, "disturbance": 0.0,
        "times": {"dagexec": time, "onnxruntime": time | {"milliseconds": 16}, "openvino": time | {"milliseconds": 10}},
        "ratios": {"onnxruntime": 0.5, "openvino": 0.79},
    }  # fmt: skip
    report = {
        "environment": {"processor": "some", "cores": 2, "python": "3"},
        "effort": {"rounds": 3, "turn_seconds": 0.1},
        "absent": {"torch eager": "No module named 'torch'"},
        "latencies": [row, row | {"model": "squeezenet", "ratios": {"onnxruntime": 0.96}}],
        "throughputs": [],
    }
    assert better_ratio(row) == 0.79
    limited = report | {"environment": report["environment"] | {"ONEDNN_MAX_CPU_ISA": "AVX2"}}
    reports = {"AVX2": limited, "AVX512_CORE": report}
    text = page(reports)
    wide, narrow = text.split("\n## AVX2\n")
    assert "\n## AVX512_CORE\n" in wide
    assert "| batch 1, 2 threads: worst network (squeezenet) | at most 0.95 | 0.960 | missed |" in wide
    assert "| batch 1, 2 threads: worst network (squeezenet) | at most 1.05 | 0.960 | met |" in narrow
    assert "`ONEDNN_MAX_CPU_ISA=AVX2` keep dagexec and NumPy" in narrow
    assert "not** limited" not in wide
    assert "| resnet50 | 7.70 | 16.00 | 10.00 |  | 8.00 ms | **0.79** | 4.00 ms | 2.00 |" in text
    assert f"geometric mean | | | | | | **{(0.79 * 0.96) ** 0.5:.3f}**" in text
    assert "torch eager was left out" in text
    write_page(reports, tmp_path)
    assert (tmp_path / "benchmarks.md").read_text() == text
    assert "resnet50" in (tmp_path / "benchmarks.svg").read_text()


def test_rows_are_added_to_those_that_were_measured_in_the_same_way(benchmark_modules: None) -> None:
    from cnn import added

    def report(rounds: int, *rows: tuple[str, float]) -> dict[str, Any]:
        latencies = [{"model": model, "batch": 1, "threads": 1, "floor_ms": floor} for model, floor in rows]
        return {"environment": {}, "effort": {"rounds": rounds}, "latencies": latencies, "throughputs": []}

    merged = added(report(3, ("squeezenet", 1.0), ("lenet", 2.0)), report(3, ("resnet50", 3.0), ("squeezenet", 4.0)))
    assert [(row["model"], row["floor_ms"]) for row in merged["latencies"]] == [
        ("resnet50", 3.0), ("squeezenet", 4.0), ("lenet", 2.0),
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="effort"):
        added(report(3), report(5))


def test_a_result_that_differs_stops_the_run(benchmark_modules: None) -> None:
    from cnn_measure import compare_outputs
    from cnn_process import ContenderError

    class Fixed:
        options: dict[str, Any] = {}

        def __init__(self, *values: float) -> None:
            self._values = np.array(values, np.float32)

        def outputs(self) -> list[np.ndarray]:
            return [self._values]

    right, near, wrong = Fixed(1, 2), Fixed(1.001, 2), Fixed(1, 2.01)
    task: Any = None
    assert compare_outputs({"onnxruntime": right, "dagexec": near}, task)["dagexec"] == pytest.approx(0.0005, rel=1e-3)
    for other in (wrong, Fixed(1, float("nan"))):
        with pytest.raises(ContenderError, match="nothing is reported"):
            compare_outputs({"onnxruntime": right, "dagexec": other}, task)
    with pytest.raises(ContenderError, match="shape"):
        compare_outputs({"onnxruntime": right, "dagexec": Fixed(1)}, task)


@pytest.mark.slow
def test_a_peer_that_is_not_there_and_one_that_fails_say_so(benchmark_modules: None, tmp_path: Path) -> None:
    from cnn_peers import Task
    from cnn_process import AbsentError, Contender, ContenderError

    (tmp_path / "broken.onnx").write_bytes(b"no model")
    task = Task(tmp_path / "broken.onnx", {}, 1)
    with pytest.raises(ContenderError, match="onnxruntime"):
        Contender("onnxruntime", task, {})
    for package in ("torch", "openvino"):
        try:
            __import__(package)
        except ImportError:
            with pytest.raises(AbsentError, match=package):
                Contender(package, task, {})


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_a_light_model_for_more_images_gives_each_the_result_it_has_alone(benchmark_modules: None, batch: int) -> None:
    from cnn_models import workload

    load = workload("shufflenet", batch)
    [(name, images)] = load.feeds.items()
    together = _run(load.model, {name: images})
    alone = _run(workload("shufflenet", 1).model, {name: images[-1:]})
    assert together.shape == (batch, 1000)
    np.testing.assert_allclose(together[-1:], alone, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet", "mobilenet_v2", "nasnet_a"])
def test_an_exported_net_is_the_same_network(benchmark_modules: None, name: str) -> None:
    from onnx_export import to_onnx

    model = zoo.build(name, batch_size=1)
    proto = to_onnx(model)
    image = np.random.default_rng(3).standard_normal((1, 3, 224, 224), np.float32)
    with dagexec.compile(model, optimize=False) as executor:
        expected = executor.run({"data": image})["softmax"]
    np.testing.assert_allclose(_run(proto, {"data": image}), expected, rtol=1e-3, atol=1e-7)


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, feeds)[0]
    return found
