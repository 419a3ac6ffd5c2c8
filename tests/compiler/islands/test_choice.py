"""The choice between own kernels and islands: whole nets and parts of them, with and without time to measure."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import dagexec
from dagexec.compiler import compilation
from dagexec.compiler.compilation import compile_model
from dagexec.compiler.islands import choice, mixing
from dagexec.compiler.islands.choice import Bench
from dagexec.compiler.islands.plans import PlanPart, plan_from_text, plan_text, with_plan
from dagexec.compiler.islands.regions import island_source
from dagexec.core.choices import choices
from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import NetDef
from dagexec.foreign import island
from dagexec.options import CompileOptions
from dagexec.platform.deadline import Deadline
from tests.compiler.islands.nets import ANY, convolutions, fed
from tests.ops.running import operator_def


@pytest.fixture(autouse=True)
def _no_choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("DAGEXEC_CHOICES", str(tmp_path / "choices.json"))
    choices.forget()
    yield
    choices.forget()


def compiled(**options: Any) -> tuple[list[str], tuple[str, ...]]:
    """The types of the operators, and what the report says of islands."""
    given = {"islands": "auto", "num_workers": 1, "intra_op_threads": 1, **ANY, **options}
    found = compile_model(dagexec.load_model(convolutions()), CompileOptions(**given))
    assert found.report is not None
    return [one.type for one in found.model.net.op], found.report.islands


def planted(monkeypatch: pytest.MonkeyPatch, islands: float) -> None:
    """Runs of models with islands take so many times what those of others take."""

    def seconds(_bench: object, trials: list[Any], _limit: float) -> list[float]:
        return [islands if "Island" in {one.type for one in trial.model.net.op} else 1.0 for trial in trials]

    monkeypatch.setattr(Bench, "run_seconds", seconds)


@pytest.mark.parametrize(("islands", "taken"), [(0.95, False), (0.85, True)])
def test_without_time_for_tuning_islands_must_win_short_runs_clearly(
    islands: float, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, islands)
    assert ("Island" in compiled()[0]) == taken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("islands", "is_installed", "is_off", "taken"),
    [
        (None, True, False, True),
        ("none", True, False, False),
        (None, False, False, False),
        (None, True, True, False),  # NumPy was asked for
    ],
)
def test_where_no_kernels_run_onnxruntime_computes_unless_somebody_says_otherwise(
    islands: str | None,
    is_installed: bool,
    is_off: bool,
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert "Island" not in compiled(islands=None)[0]  # this processor has kernels
    monkeypatch.setattr(compilation, "engine_library", lambda: None)
    monkeypatch.setattr(compilation, "are_switched_off", lambda: is_off)
    monkeypatch.setattr(compilation, "find_spec", lambda _name: object() if is_installed else None)
    with caplog.at_level(logging.INFO, "dagexec"):
        assert ("Island" in compiled(islands=islands)[0]) is taken
    told = [one.message for one in caplog.records if "no kernels run on this processor" in one.message]
    assert len(told) == taken


def test_what_short_runs_decided_is_kept_until_there_is_time_for_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "Deadline", lambda _seconds: Deadline(math.inf))  # what comes too late is not kept
    planted(monkeypatch, 0.5)
    assert "Island" in compiled()[0]
    planted(monkeypatch, 2.0)
    operators, said = compiled()
    assert "Island" in operators
    assert any("(known)" in line for line in said)
    assert "Island" not in compiled(tuning_seconds=30.0)[0]
    assert "Island" not in compiled()[0]


def test_a_runtime_that_is_not_installed_as_a_whole_leaves_own_kernels_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"lib{name}.so.1: cannot open shared object file")

    monkeypatch.setattr(island.importlib, "import_module", fail)
    for name in ("auto", "onnxruntime"):
        caplog.clear()
        operators, said = compiled(islands=name)
        assert "Island" not in operators
        assert "onnxruntime cannot be used: it is installed, but not as a whole: ImportError" in said[0]
        assert "libonnxruntime.so.1: cannot open" in caplog.text


# --- parts of a net


def chain(count: int) -> Model:
    """b1 = Relu(x w); b2 = Relu(b1 w); ..."""
    operators = []
    for number in range(count):
        before = f"b{number}" if number else "x"
        operators += [operator_def("MatMul", [before, "w"], [f"a{number + 1}"])]
        operators += [operator_def("Relu", [f"a{number + 1}"], [f"b{number + 1}"])]
    weights = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
    return Model("chain", NetDef(name="chain", op=operators), None, {"w": weights},
                 {"x": InputInfo(FLOAT32, (2, 40))}, (f"b{count}",))  # fmt: skip


def test_a_net_is_cut_where_own_kernels_have_what_crosses() -> None:
    """The results of products are part of fused layers, so no cut is there."""
    model = chain(3)
    own = compile_model(model, CompileOptions()).model
    assert [one.output[0] for one in own.net.op] == ["b1", "b2", "b3"]
    assert mixing.find_cuts(island_source(model, {}), own) == {2: {"b1"}, 4: {"b2"}}


def test_operators_of_a_compiled_net_count_before_the_first_cut_that_they_are_needed_for() -> None:
    own = compile_model(chain(4), CompileOptions()).model
    assert mixing.segment_seconds(own, [1.0, 2.0, 4.0, 8.0], [{"b1"}, {"b3"}]) == [1.0, 6.0, 8.0]


def test_cuts_are_left_out_until_segments_take_a_twelfth_of_the_time() -> None:
    assert mixing.coarse_cuts([1, 2, 3, 4], [0.05, 0.05, 0.9, 0.01, 0.2]) == [3]
    assert mixing.coarse_cuts([1, 2], [1.0, 1.0, 1.0]) == [1, 2]


def test_each_segment_goes_to_who_computes_it_faster_by_more_than_entering_it_costs() -> None:
    own = [1.0, 1.0, 1.0, 1.0, 3e-5]
    others = {"onnxruntime": [0.5, 0.95, 0.5, 0.4, 2e-5], "openvino": [0.6, 2.0, 0.4, 0.5, 1e-5]}
    assert mixing.mixed_plan([2, 4, 6, 8], 9, own, others) == (  # type: ignore[arg-type]
        PlanPart("onnxruntime", 0, 2), PlanPart("openvino", 4, 6), PlanPart("onnxruntime", 6, 8),
    )  # fmt: skip
    assert mixing.mixed_plan([2, 4, 6, 8], 9, own, {"onnxruntime": [0.1] * 4 + [1.0]}) == (
        PlanPart("onnxruntime", 0, 8),
    )


def test_a_plan_is_the_same_after_it_was_written_and_read() -> None:
    plan = (PlanPart("onnxruntime", 0, 4), PlanPart("openvino", 7, 9))
    assert plan_from_text(plan_text(plan), {"onnxruntime", "openvino"}, 9) == plan
    assert plan_from_text(plan_text(()), (), 9) == ()
    assert plan_from_text(plan_text(plan), {"openvino"}, 9) is None
    assert plan_from_text(plan_text(plan), {"onnxruntime", "openvino"}, 8) is None
    assert plan_from_text("onnxruntime", {"onnxruntime"}, 9) is None
    assert plan_from_text("onnxruntime 5-7, onnxruntime 6-8", {"onnxruntime"}, 9) is None


def test_own_kernels_compute_what_no_part_of_a_plan_holds_and_results_are_the_same() -> None:
    proto = convolutions()
    source = island_source(dagexec.load_model(proto), {})
    names = [one.type for one in source.model.net.op]
    middle = names.index("Relu") + 1
    model = with_plan(source, [PlanPart("onnxruntime", middle, len(names))], {"onnxruntime": "any"})
    assert [one.type for one in model.net.op].count("Island") == 1
    assert names[:middle] == [one.type for one in model.net.op if one.type != "Island"][:middle]
    [expected] = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, fed(2, 3, 12, 12))
    net = dagexec.compile(model, optimize=False)
    with net as executor:
        np.testing.assert_allclose(next(iter(executor.run(fed(2, 3, 12, 12)).values())), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_mixed_net_is_a_candidate_that_is_measured_taken_and_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Own kernels are slow in the first layers only, so those alone are in an island."""
    proto = convolutions()
    onnxruntime_only = {"onnxruntime": "any"}
    monkeypatch.setattr("dagexec.compiler.islands.choice.usable_runtimes", lambda _wanted: (onnxruntime_only, {}))

    def operator_seconds(_bench: object, model: Model, _limit: float) -> list[float]:
        if any(one.type == "Island" for one in model.net.op):
            return [0.1] * len(model.net.op)
        return [1.0, *[1e-4] * (len(model.net.op) - 1)]

    def run_seconds(_bench: object, trials: list[Any], _limit: float) -> list[float]:
        return [1.0 if {one.type for one in trial.model.net.op} - {"Island"} else 2.0 for trial in trials[:1]] + [
            0.1 if len(trial.model.net.op) > 1 else 2.0 for trial in trials[1:]
        ]

    monkeypatch.setattr(Bench, "operator_seconds", operator_seconds)
    monkeypatch.setattr(Bench, "run_seconds", run_seconds)
    operators, said = compiled(tuning_seconds=30.0)
    assert "Island" in operators
    assert set(operators) - {"Island"}
    assert any("taken" in line for line in said)
    kept = json.loads((tmp_path / "choices.json").read_text())
    assert "onnxruntime 0-" in str(kept)
    monkeypatch.setattr(Bench, "run_seconds", None)
    again, said = compiled()
    assert again.count("Island") == 1
    assert any("(known)" in line for line in said)
    [expected] = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, fed(2, 3, 12, 12))
    with dagexec.compile(proto, islands="auto", num_workers=1, intra_op_threads=1, **ANY) as executor:
        np.testing.assert_allclose(next(iter(executor.run(fed(2, 3, 12, 12)).values())), expected, rtol=1e-5, atol=1e-5)


def test_types_that_sizes_of_inputs_must_agree_for_are_found_with_the_shapes_that_are_given() -> None:
    """A product of matrices whose sizes are all free; the island still takes any that fit."""
    operators = [operator_def("MatMul", ["x", "y"], ["a"]), operator_def("Relu", ["a"], ["b"])]
    inputs = {name: InputInfo(FLOAT32, (None, None)) for name in ("x", "y")}
    model = Model("product", NetDef(name="product", op=operators), None, {}, inputs, ("b",))
    assert island_source(model, {}).regions() == []
    source = island_source(model, {"x": (2, 40), "y": (40, 3)})
    assert [len(one.operators) for one in source.regions()] == [2]
    assert source.types["b"].shape == (None, None)
    options: dict[str, Any] = {"islands": "onnxruntime", "shapes": {"x": (2, 40), "y": (40, 3)}, **ANY}
    with dagexec.compile(model, **options) as executor:
        assert [one.type for one in executor.model.net.op] == ["Island"]
        for rows, inner in ((2, 40), (5, 3)):
            feeds = {"x": np.ones((rows, inner), np.float32), "y": np.ones((inner, 4), np.float32)}
            np.testing.assert_array_equal(executor.run(feeds)["b"], np.full((rows, 4), inner, np.float32))
