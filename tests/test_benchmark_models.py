"""The benchmark of six families: its refusal of wrong results, what it measures again, and its part of the page."""

from __future__ import annotations

import json
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def measuring() -> ModuleType:
    return import_module("model_measure")


class Fixed:
    """A contender with given results."""

    def __init__(self, *outputs: Any) -> None:
        self._outputs = [np.array(values, np.float32) for values in outputs]

    def outputs(self) -> list[np.ndarray]:
        return self._outputs


@pytest.mark.parametrize(
    ("outputs", "refused"),
    [
        (([10.0, 10.5], [3.0]), False),
        (([10.0, 10.50049], [3.0]), False),
        (([10.0, 10.5006], [3.0]), "off by 0.0012 of the range, more than 0.001"),
        (([10.0, 10.5], [3.004]), "off by 0.0013 of the range"),
        (([float("nan"), 10.5], [3.0]), "off by nan of the range"),
        (([10.0, 10.5], [float("nan")]), "off by nan of the range"),
        (([10.0, 10.5],), "shapes (2,), where onnxruntime's differ"),
        (([[10.0, 10.5]], [3.0]), "shapes (1, 2), (1,), where onnxruntime's differ"),
    ],
)
def test_a_result_that_is_not_the_reference_s_is_refused(
    measuring: ModuleType, outputs: tuple[Any, ...], refused: str | bool
) -> None:
    """By the range of each result, of which a constant part is no share: half a thousandth of 0.5 passes for 10.5."""
    running = {"onnxruntime": Fixed([10.0, 10.5], [3.0]), "dagexec": Fixed(*outputs)}
    verdict = measuring.verdicts(running, 1e-3)["dagexec"]
    assert refused in verdict["refused"] if refused else "refused" not in verdict


def test_integers_may_be_as_far_from_exact_results_as_the_reference_s_and_half_more(measuring: ModuleType) -> None:
    running = {"onnxruntime": Fixed([1.0, 2.2]), "near": Fixed([1.0, 1.71]), "far": Fixed([1.0, 2.31])}
    found = measuring.verdicts(running, 0.05, [np.array([1.0, 2.0], np.float32)])
    assert "refused" not in found["onnxruntime"] | found["near"]
    assert found["far"]["refused"] == "a result is off by 0.31 of the range, more than 0.3"


def test_a_refused_contender_has_no_turn_and_no_time(measuring: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = import_module("contextlib")
    wrong = Fixed([1.0, 3.0])
    wrong.closed = False
    wrong.close = lambda: setattr(wrong, "closed", True)
    running = {"onnxruntime": Fixed([1.0, 2.0]), "dagexec": wrong}
    monkeypatch.setattr(measuring, "best", lambda peer, *_: contexts.nullcontext((running[peer], {})))
    monkeypatch.setattr(measuring, "rounds", lambda left, _effort: ({name: [] for name in left}, 0.0))
    monkeypatch.setattr(measuring, "_entry", lambda _contender, _turns: {"ms": 1.0})
    contenders = import_module("model_contenders")
    columns = {name: contenders.Column(None, ({},)) for name in running}
    row = measuring.measured(contenders.Case("encoder/a", 1, 1), columns, None)
    assert wrong.closed
    assert row["contenders"]["onnxruntime"]["ms"] == 1.0
    assert "ms" not in row["contenders"]["dagexec"]
    assert row["contenders"]["dagexec"]["refused"].startswith("a result is off by 1 of the range")
    assert row["ratios"] == {}


def test_there_are_forty_models_in_six_families() -> None:
    """Counted in the modules' text, since importing them needs PyTorch; each family has the least that it needs."""
    families = import_module("families").FAMILIES
    assert len(families) == 6
    assert all((BENCHMARKS / "families" / f"{family}.py").exists() for family in families)
    record = json.loads((BENCHMARKS / "results" / "models.json").read_text())
    for report in record.values():
        counts = {family: sum(name.startswith(f"{family}/") for name in report["rows"]) for family in families}
        assert min(counts.values()) >= 5
        assert sum(counts.values()) >= 40


def written(folder: Path, name: str) -> None:
    """A model of one operator with an axis of any size, and its feeds for 1 and 8 rows."""
    types = [helper.make_tensor_value_info(blob, TensorProto.FLOAT, ["rows", 2]) for blob in "xy"]
    graph = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "absolute", types[:1], types[1:])
    file = folder / f"{name}.onnx"
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    for number, rows in enumerate((1, 8)):
        np.savez(folder / f"{name}.{number}.npz", x=np.ones((rows, 2), np.float32))


def options(folder: Path, **changed: Any) -> Namespace:
    given = {"folder": folder, "json": folder / "rows.json", "batch": [1], "threads": [1], "precision": ["float32"]}
    left_out = {"seconds": 60.0, "again": False, "any_commit": False, "torch": "", "tuning": 0.0}
    return Namespace(**(given | left_out | {"quick": True, "rounds": 2} | changed))


def test_rows_of_the_same_commit_are_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    benchmark = import_module("models")
    for name in ("encoder/a", "recurrent/b"):
        written(tmp_path, name)
    asked: list[tuple[str, str, list[str]]] = []

    def measured(case: Any, columns: dict[str, Any], _effort: Any) -> dict[str, Any]:
        asked.append((case.name, case.way, sorted(columns)))
        return {"contenders": {name: {"ms": 1.0, "peak_mib": 9} for name in columns}, "ratios": {}}

    monkeypatch.setattr(benchmark, "measured", measured)
    monkeypatch.setattr(benchmark, "source_commit", lambda: "new")
    reports: dict[str, Any] = {}

    def ask(names: list[str], **changed: Any) -> list[tuple[str, str, list[str]]]:
        asked.clear()
        benchmark.add_rows(options(tmp_path, **changed), names, reports)
        return list(asked)

    every, way = ["dagexec", "onnxruntime", "openvino"], "batch 1, 1 thread, float32"
    assert ask(["encoder/a"]) == [("encoder/a", way, every)]
    assert ask(["encoder/a", "recurrent/b"]) == [("recurrent/b", way, every)]
    assert ask(["encoder/a"], again=True) == [("encoder/a", way, every)]
    with_torch = ["dagexec", "onnxruntime", "torch compiled", "torch eager"]
    assert ask(["encoder/a"], torch="python") == [("encoder/a", way, with_torch)]
    assert ask(["encoder/a"], torch="python") == []
    monkeypatch.setattr(benchmark, "source_commit", lambda: "newer")
    assert ask(["encoder/a"], any_commit=True) == []
    assert ask(["recurrent/b"]) == [("recurrent/b", way, every)]
    assert json.loads((tmp_path / "rows.json").read_text()) == reports


def test_contenders_are_told_sizes_and_precision(tmp_path: Path) -> None:
    contenders = import_module("model_contenders")
    written(tmp_path, "encoder/a")
    feeds = {"x": np.ones((8, 2), np.float32)}
    columns = contenders.columns(tmp_path, contenders.Case("encoder/a", 8, 1, "bfloat16"), feeds)
    assert columns["onnxruntime"].task.sizes == {"rows": 8}
    assert columns["dagexec"].settings[0]["dtype"] == "bfloat16"
    assert {setting["INFERENCE_PRECISION_HINT"] for setting in columns["openvino"].settings} == {"bf16"}
    whole = contenders.columns(tmp_path, contenders.Case("encoder/a", 8, 1, "int8"), feeds)
    assert whole["dagexec"].task.model == whole["onnxruntime"].task.model == tmp_path / "encoder" / "a.int8.onnx"
    assert whole["dagexec calibrated"].task.model == tmp_path / "encoder" / "a.onnx"


@pytest.mark.slow
def test_a_case_is_measured_and_the_first_result_timed(measuring: ModuleType, tmp_path: Path) -> None:
    contenders, benchmark = import_module("model_contenders"), import_module("models")
    written(tmp_path, "encoder/a")
    feeds = {"x": np.array([[-1.0, 2.0]], np.float32)}
    case = contenders.Case("encoder/a", 1, 1)
    columns = contenders.columns(tmp_path, case, feeds)
    del columns["openvino"]  # the other two are enough, and quick
    row = measuring.measured(case, columns, benchmark.QUICK)
    ours = row["contenders"]["dagexec"]
    assert ours["difference"] == 0
    assert 0 < ours["least_ms"] <= ours["ms"]
    assert 0 < ours["resident_mib"] <= ours["peak_mib"]
    assert row["ratios"]["onnxruntime"] > 0
    assert measuring.first_results({"dagexec": columns["dagexec"]})["dagexec"]["warm_s"] > 0


def test_the_part_counts_families_and_leaves_the_rest_of_the_page(tmp_path: Path) -> None:
    page = import_module("models_page")

    def row(ratio: float, peak: int, **entry: Any) -> dict[str, Any]:
        peers = {"onnxruntime": {"ms": 4.0, "peak_mib": 100}, "openvino": {"ms": 2.0, "peak_mib": 150}}
        ours = entry or {"ms": 2 * ratio, "peak_mib": peak}
        ratios = {} if entry else {"onnxruntime": ratio / 2, "openvino": ratio}
        return {"contenders": peers | {"dagexec": ours}, "ratios": ratios}

    way = "batch 1, 1 thread, float32"
    rows = {
        "encoder/a": {way: row(0.5, 130), "batch 1, 1 thread, int8": row(0.7, 90)},
        "encoder/b": {way: row(2.0, 90)},
        "recurrent/c": {way: row(0, 0, refused="a result is off by 1 of the range, more than 0.001")},
    }
    kinds = [{"operator": "Conv (ONEDNN)", "count": 3, "share": 0.62, "ms": 1.0, "gflop_s": 40.0, "gb_s": 2.0}]
    report = {
        "environment": {
            "processor": "P",
            "cores": 2,
            "python": "3.11",
            "onnxruntime": "1.0",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
        },
        "rows": rows,
        "first_results": {"encoder/a": {"contenders": {"dagexec": {"cold_s": 1.5, "warm_s": 0.5}}}},
        "profiles": {"encoder/b": {"ms": 4.0, "operators": kinds}},
    }
    text = page.part({"AVX2": report})
    assert f"| family | models | target | {way} | batch 1, 1 thread, int8 |" in text
    assert "| transformer encoder | 2 | 0.95 | **1.00** | **0.70** |" in text
    assert "| slower than 1.10 | | 0 | 1 of 2 | 0 of 1 |" in text
    assert "| more than 1.2 times the memory | | 0 | 1 of 2 | 0 of 1 |" in text
    assert "| refused or failed | | 0 | 1 | 0 |" in text
    assert "| encoder/b | 4.00 | 2.00 | 4.00 | **2.00** | 90 | 0.90 |" in text
    assert "| recurrent/c | 4.00 | 2.00 | refused |  |  |  |" in text
    assert "| encoder/b | 4.00 | Conv (ONEDNN) | 3 | 62% | 40.0 | 2.0 |" in text
    assert "1.50, 0.50" in text
    assert "islands" not in text.partition("| family |")[2]
    rows["encoder/b"][way]["contenders"]["dagexec with islands"] = {"ms": 2.5, "peak_mib": 120}
    rows["encoder/b"][way]["ratios"]["dagexec with islands"] = 1.6
    with_islands = page.part({"AVX2": report})
    assert "| all, with islands | | | **1.25** |  |" in with_islands
    assert "| encoder/b | 4.00 | 2.00 | 4.00 | 2.50 | **2.00** | **1.25** | 90 | 0.90 |" in with_islands
    assert "**not** limited" in text
    assert "- recurrent/c, dagexec refused: a result is off by 1 of the range" in text
    text, document = with_islands, tmp_path / "benchmarks.md"
    document.write_text("# Benchmarks\n\nabove\n\n# Whole networks on the processor\n\nbelow\n")
    page.write_part({"AVX2": report}, document)
    page.write_part({"AVX2": report}, document)
    assert document.read_text() == f"# Benchmarks\n\nabove\n\n{text}\n# Whole networks on the processor\n\nbelow\n"
    del report["environment"]["onnxruntime"]  # type: ignore[attr-defined]
    assert "cannot be limited, and is left out" in page.part({"AVX2": report})


def test_the_worst_models_come_first() -> None:
    profiles = import_module("model_profile")
    ratios = {"a": 1, "b": 3, "c": 2}
    rows: dict[str, Any] = {
        name: {"way": {"ratios": {"onnxruntime": ratio, "openvino": 0.1}}} for name, ratio in ratios.items()
    }
    rows["d"] = {"way": {"ratios": {}}}
    assert profiles.worst(rows, "way", 2) == ["b", "c"]
