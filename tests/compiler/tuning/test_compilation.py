from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import dagexec
from dagexec.binding.parameters import initialized
from dagexec.building.model_builder import ModelBuilder
from dagexec.compiler.compilation import compile_model
from dagexec.compiler.passes.layout import layouts
from dagexec.compiler.tuning.bench import Bench, random_inputs
from dagexec.compiler.tuning.runner import Trial
from dagexec.core.choices import choices
from dagexec.core.graph import build_graph
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator, Step
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.registry import new_operator
from dagexec.errors import ArgumentError
from dagexec.ops.base.layout import BLOCKS
from dagexec.ops.engines.onednn.binding import library
from dagexec.options import CompileOptions
from dagexec.platform.deadline import Deadline
from dagexec.scheduler.plan.plan import build_plan
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.prediction import TimedTasks

needs_onednn = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")


@new_operator("ApplicationsOwn", inputs=(1, 1), outputs=(1, 1), infer=lambda call: [call.inputs[0]], doc="Test.")
class ApplicationsOwn(Operator):
    def prepare(self) -> Step:
        raise AssertionError("it is not to be run")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of choices, which are forgotten before and after."""
    path = tmp_path / "choices.json"
    monkeypatch.setenv("DAGEXEC_CHOICES", str(path))
    choices.forget()
    yield path
    monkeypatch.undo()
    choices.forget()


def small_net(batch: int | None = 1) -> Model:
    """Two branches of convolutions on images of 12 x 12, joined, pooled and classified."""
    builder = ModelBuilder("small", seed=3)
    x = builder.add_input("data", (batch, 3, 12, 12))
    x = builder.relu(builder.conv(x, "first", 3, 16, kernel=3, pad=1), "first_relu")
    left = builder.relu(builder.conv(x, "left", 16, 16, kernel=3, pad=1), "left_relu")
    right = builder.relu(builder.conv(x, "right", 16, 24, kernel=1), "right_relu")
    right = builder.relu(builder.conv(right, "right2", 24, 16, kernel=3, pad=1), "right2_relu")
    x = builder.global_average_pool(builder.concat([left, right], "joined"), "pooled")
    return builder.model([builder.softmax(builder.fc(x, "pred", 32, 10), "softmax")])


def image(batch: int = 1) -> dict[str, np.ndarray]:
    return {"data": np.random.default_rng(5).standard_normal((batch, 3, 12, 12), np.float32)}


def as_given(model: Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    with dagexec.compile(model, optimize=False) as executor:
        return executor.run(feeds)["softmax"]


class Invented:
    """A bench whose times are made up: a run takes what is written in `runs` for its layout, its tasks `work`."""

    made: list[Invented] = []

    def __init__(self, *_given: object) -> None:
        self.trials: list[Trial] = []
        Invented.made.append(self)

    runs: dict[str, float] = {}
    work: float = 1e-3

    def keep_only(self, model: Model) -> None:
        pass

    def parameters(self, model: Model) -> None:
        return None

    def run_seconds(self, trials: Sequence[Trial], seconds: float) -> list[float]:
        self.trials += trials
        return [self.runs.get(_order(trial.model), 1.0) for trial in trials]

    def tasks(self, model: Model, seconds: float) -> TimedTasks:
        return TimedTasks(TaskGraph([4], [[]], [0], [0]), [self.work])


def _order(model: Model) -> str:
    found = {argument.s.decode() for one in model.net.op for argument in one.arg if argument.name == "order"}
    return next((order for order in (*BLOCKS, "NHWC") if order in found), "NCHW")


@pytest.fixture
def invented(cache: Path, monkeypatch: pytest.MonkeyPatch) -> type[Invented]:
    monkeypatch.setattr("dagexec.compiler.compilation.Bench", Invented)
    monkeypatch.setattr("dagexec.platform.processor.available_cores", lambda: 2)
    monkeypatch.setattr(Invented, "made", [])
    return Invented


@needs_onednn
@pytest.mark.parametrize("position", [0, 1])
def test_the_layout_that_is_measured_to_be_fastest_is_the_one_that_runs(
    position: int, cache: Path, invented: type[Invented], monkeypatch: pytest.MonkeyPatch
) -> None:
    best = layouts()[position]
    monkeypatch.setattr(invented, "runs", dict.fromkeys(layouts(), 2e-3) | {best: 1e-3})
    compiled = compile_model(small_net(), CompileOptions(tuning_seconds=1.0))
    assert _order(compiled.model) == best
    assert compiled.report is not None
    assert (compiled.report.layout.split()[0], compiled.report.origin) == (best, "measured")


@pytest.mark.slow
@needs_onednn
def test_the_second_compilation_of_a_net_measures_nothing(
    cache: Path, invented: type[Invented], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invented, "runs", dict.fromkeys(layouts(), 1e-3) | {"NHWC": 2e-3})
    first = compile_model(small_net(), CompileOptions(tuning_seconds=1.0))
    kept = json.loads(cache.read_text())["choices"]
    assert sorted(key.split(" | ")[0] for key in kept) == ["layout", "run"]
    assert all("onednn" in key and "cores" in key and "small" in key for key in kept)
    choices.forget()  # as in another process
    invented.made.clear()
    second = compile_model(small_net(), CompileOptions(tuning_seconds=1.0))
    assert not invented.made
    assert second.report is not None
    assert second.report.origin == "known"
    assert second.model.net == first.model.net
    assert second.options == first.options
    compile_model(small_net(2), CompileOptions(tuning_seconds=1.0))
    assert invented.made  # another batch size is another geometry


@needs_onednn
def test_a_damaged_choice_is_measured_anew(cache: Path, invented: type[Invented]) -> None:
    compile_model(small_net(), CompileOptions(tuning_seconds=1.0))
    content = json.loads(cache.read_text())
    content["choices"] = dict.fromkeys(content["choices"], "nonsense")
    cache.write_text(json.dumps(content))
    choices.forget()
    compiled = compile_model(small_net(), CompileOptions(tuning_seconds=1.0))
    assert compiled.report is not None
    assert compiled.report.origin == "measured"


def test_without_time_for_tuning_nothing_is_measured(invented: type[Invented]) -> None:
    compiled = compile_model(small_net(), CompileOptions(tuning_seconds=0.0))
    assert not invented.made
    assert compiled.report is not None
    assert compiled.report.origin == "estimated"
    assert compiled.model.net == compile_model(small_net(), CompileOptions(tuning_seconds=0.0)).model.net


def test_an_input_of_unknown_shape_is_not_measured_with(invented: type[Invented]) -> None:
    builder = ModelBuilder("unknown")
    x = builder.add_input("data", (1, 4))
    model = builder.model([builder.relu(x, "y")])
    unknown = Model(model.name, model.net, None, {}, {"data": InputInfo()}, ("y",))
    assert random_inputs(unknown, {}) is None
    compile_model(unknown, CompileOptions(tuning_seconds=1.0))
    assert not invented.made
    compile_model(unknown, CompileOptions(tuning_seconds=1.0, shapes={"data": (3, 4)}))
    assert invented.made


def test_operators_of_an_application_are_not_run_to_be_measured(invented: type[Invented]) -> None:
    net = NetDef(name="own")
    net.op.append(OperatorDef(type="ApplicationsOwn", input=["x"], output=["y"]))
    model = Model("own", net, None, {}, {"x": InputInfo(shape=(1, 4))}, ("y",))
    compiled = compile_model(model, CompileOptions(tuning_seconds=1.0))
    assert not invented.made
    assert compiled.report is not None
    assert compiled.report.origin == "estimated"


@pytest.mark.slow
def test_shapes_that_the_net_does_not_take_are_no_obstacle(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    builder = ModelBuilder("free")
    x = builder.conv(builder.add_input("data", (None, 3, None, None)), "conv", 3, 16, kernel=5)
    model = builder.model([builder.relu(x, "y")])
    with dagexec.compile(model, tuning_seconds=30) as executor:  # an image of 1 x 1 is smaller than the window
        assert executor.run({"data": np.ones((2, 3, 9, 9), np.float32)})["y"].shape == (2, 16, 5, 5)
    assert "net 'free': not measured, give compile() the shapes to tune for" in caplog.text
    assert not cache.exists()
    caplog.clear()
    dagexec.compile(model, tuning_seconds=30, shapes={"data": (2, 3, 9, 9)}).close()
    assert not caplog.text
    assert cache.exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"net_type": "async_dag"}, ("async_dag", None)),
        ({"num_workers": 2}, (None, 2)),
        ({"net_type": "simple", "num_workers": 1}, ("simple", 1)),
        ({"replicas": 2}, (None, 2)),
    ],
)
def test_what_is_given_is_kept(
    options: dict[str, object], expected: tuple[str | None, int | None], invented: type[Invented]
) -> None:
    for seconds in (0.0, 1.0):
        compiled = compile_model(small_net(), CompileOptions(tuning_seconds=seconds, **options))  # type: ignore[arg-type]
        net_type, workers = expected
        assert net_type in (None, compiled.options.net_type)
        assert workers in (None, compiled.options.num_workers)


def test_what_a_run_is_measured_to_take_decides_now_and_later(
    cache: Path, invented: type[Invented], monkeypatch: pytest.MonkeyPatch
) -> None:
    for work, expected in ((10e-6, "simple"), (1.0, "dag")):
        monkeypatch.setattr(invented, "work", work)
        choices.forget()
        cache.unlink(missing_ok=True)
        assert compile_model(small_net(), CompileOptions(tuning_seconds=1.0)).options.net_type == expected
        again = compile_model(small_net(), CompileOptions(tuning_seconds=0.0))
        assert again.options.net_type == expected
        assert again.report is not None
        assert again.report.schedule is not None
        assert again.report.schedule.predicted(2)[1] == pytest.approx(work)


def pyramid() -> Model:
    """A detector: a backbone, a pyramid of features from three of its levels, and two heads on each."""
    builder = ModelBuilder("pyramid", seed=3)
    x = builder.add_input("data", (1, 3, 128, 128))
    levels = []
    for number, channels in enumerate((64, 128, 256)):
        before = 3 if not levels else channels // 2
        x = builder.conv(x, f"down{number}", before, channels, kernel=3, stride=2, pad=1)
        x = builder.relu(x, f"level{number}")
        for part in "abcd":  # what the branches save is little beside the backbone
            x = builder.relu(builder.conv(x, f"{part}{number}", channels, channels, kernel=3, pad=1), f"{x}{part}")
        levels.append((x, channels))
    found, above = [], None
    for number, (level, channels) in reversed(list(enumerate(levels))):
        lateral = builder.conv(level, f"lateral{number}", channels, 16, kernel=1)
        if above is not None:
            builder.add_operator("ResizeNearest", [above], [f"larger{number}"], width_scale=2.0, height_scale=2.0)
            builder.add_operator("Sum", [lateral, f"larger{number}"], [f"merged{number}"])
            lateral = f"merged{number}"
        above = lateral
        for head, outputs in (("class", 12), ("box", 4)):
            y = builder.relu(builder.conv(lateral, f"{head}{number}a", 16, 16, kernel=3, pad=1), f"{head}{number}b")
            found.append(builder.conv(y, f"{head}{number}", 16, outputs, kernel=3, pad=1))
    return builder.model(found)


def test_heads_that_do_not_need_each_other_stay_independent() -> None:
    options = CompileOptions(net_type="dag", num_workers=2, intra_op_threads=1)
    compiled = compile_model(pyramid(), options)
    assert not any(one.control_input for one in compiled.model.net.op)
    graph = build_graph(compiled.model.net, lambda _name: True)
    heads = [name for name in compiled.model.outputs if name.startswith(("class", "box"))]
    ends = [next(i for i, one in enumerate(graph.operators) if name in one.output) for name in heads]
    chain_of = build_plan(graph, [1.0] * len(graph)).chain_of
    assert len({chain_of[end] for end in ends}) == len(heads) == 6


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.3])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"net_type": "async_dag"}, {"replicas": 2}])
def test_results_are_those_of_the_net_as_it_is_given(seconds: float, options: dict[str, object], cache: Path) -> None:
    model = initialized(small_net(None))
    with dagexec.compile(model, tuning_seconds=seconds, **options) as executor:  # type: ignore[arg-type]
        for batch in (1, 3):
            found = executor.run(image(batch))["softmax"]
            np.testing.assert_allclose(found, as_given(model, image(batch)), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_bits_are_the_same_under_every_net_and_number_of_workers() -> None:
    compiled = compile_model(small_net(), CompileOptions(tuning_seconds=0.0)).model
    found = set()
    for net_type, workers in (("simple", 1), ("dag", 1), ("dag", 2), ("async_dag", 2)):
        with dagexec.compile(compiled, optimize=False, net_type=net_type, num_workers=workers) as executor:
            found |= {executor.run(image())["softmax"].tobytes() for _ in range(5)}
    assert len(found) == 1


def test_a_pass_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"layuot.*layout"):
        compile_model(small_net(), CompileOptions(without_passes=frozenset({"layuot"})))


@needs_onednn
def test_passes_can_be_left_out() -> None:
    plain = compile_model(small_net(), CompileOptions(tuning_seconds=0.0, without_passes=frozenset({"engine"})))
    assert not any(one.engine for one in plain.model.net.op)
    nchw = compile_model(small_net(), CompileOptions(tuning_seconds=0.0, without_passes=frozenset({"layout"})))
    assert _order(nchw.model) == "NCHW"
    assert any(one.engine == "ONEDNN" for one in nchw.model.net.op)


def test_kept_blobs_survive_and_are_no_outputs() -> None:
    compiled = compile_model(small_net(), CompileOptions(tuning_seconds=0.0, keep=frozenset({"left_relu"})))
    assert compiled.model.outputs == ("softmax",)
    assert any("left_relu" in one.output for one in compiled.model.net.op)


def test_on_a_device_only_what_suits_any_processor_is_done() -> None:
    compiled = compile_model(small_net(), CompileOptions(device="sim:0"))
    assert not any(one.engine for one in compiled.model.net.op)
    assert compiled.report is not None
    assert compiled.report.schedule is None
    assert len(compiled.model.net.op) < len(small_net().net.op)


def test_the_report_says_what_was_done(invented: type[Invented]) -> None:
    report = compile_model(small_net(), CompileOptions(tuning_seconds=1.0)).report
    assert report is not None
    lines = report.lines()
    assert any(line.startswith("activation-fusion: ") for line in lines)
    assert any(line.startswith("layout: ") for line in lines)
    assert "schedule: net type dag, 2 worker(s)" in lines
    assert "  1 worker(s): predicted 1.000 ms (measured)" in lines
    assert lines[-1].startswith("seconds: init net ")


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_seconds_for_tuning_must_be_a_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGEXEC_TUNING_SECONDS", text)
    with pytest.raises(ValueError, match=f"DAGEXEC_TUNING_SECONDS must be a number of seconds.*{text}"):
        compile_model(small_net(), CompileOptions())


def test_a_layout_in_which_the_net_fails_is_passed_over(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench({"data": image()["data"]}, 0.0, Deadline(60.0))
    good = initialized(small_net())
    broken = Model("broken", good.net, None, {}, good.inputs, good.outputs)  # its parameters are missing
    with caplog.at_level("INFO", logger="dagexec"):
        times = bench.run_seconds([Trial(good), Trial(broken)], 0.0)
    assert times[0] < 1.0
    assert times[1] == float("inf")
    assert "net 'broken' cannot be measured (MissingBlobError)" in caplog.text
