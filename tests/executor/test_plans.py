"""Plans: an opened executor gives the bytes of the one that was compiled; what does not fit is compiled anew."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import dagexec
from dagexec import CompileOptions, Executor, Model, NetDef, Pipeline, TensorSpec, op
from dagexec.binding.kept import chosen_implementations, packed_forms
from dagexec.core.constant import Constant
from dagexec.core.feeds import Array
from dagexec.errors import FeedError, ModelFormatError, PlanError, SettingError, ShapeError
from dagexec.executor.warm_up import zero_feeds
from dagexec.plans import plan as plans
from tests.models import he_normal_light_model, light_model_input
from tests.ops.onednn.engine import needs_onednn
from tests.plans.files import put_together, taken_apart

SMALL = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["" : 17]>
    small (float[N, 64] x) => (float[N, 32] y) <float[32] b = {BIAS}> {
      s = Constant <value_float = 0.5> ()
      w = Constant <value_floats = [WEIGHTS]> ()
      two = Constant <value_ints = [64, 32]> ()
      m = Reshape (w, two)
      a = MatMul (x, m)
      c = Add (a, b)
      r = Relu (c)
      y = Mul (r, s)
    }""".replace("WEIGHTS", ", ".join(str(index % 13 / 8.0 + 0.1) for index in range(2048))).replace(
        "BIAS", ", ".join(str(index / 4.0) for index in range(32))
    )
)


@pytest.fixture
def model() -> Model:
    return dagexec.load_model(SMALL)


@pytest.fixture
def path(tmp_path: Path, model: Model) -> Path:
    with dagexec.compile(model) as executor:
        executor.save(tmp_path / "net.dagexec")
    return tmp_path / "net.dagexec"


def rows(count: int = 3) -> dict[str, Array]:
    return {"x": np.random.default_rng(count).standard_normal((count, 64), dtype=np.float32)}


def run_of(executor: Executor, feeds: dict[str, Array]) -> dict[str, bytes]:
    with executor:
        return {name: array.tobytes() for name, array in executor.run(feeds).items()}


def no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("dagexec.compiler.compilation.compile_model", refuse)


def is_in_file(array: Array, path: Path) -> bool:
    """True where the system has mapped the file at the array's memory."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [tuple(int(end, 16) for end in one[0].split("-")) for one in maps if one[-1] == str(path)]
    return any(first <= array.ctypes.data < end for first, end in spans)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_opened_plan_gives_the_same_bytes_and_compiles_nothing(
    path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [run_of(dagexec.compile(model), rows(count)) for count in (1, 3)]
    no_compiling(monkeypatch)
    for opened in (
        dagexec.open(path),
        dagexec.open(path, mapped=False),
        dagexec.compile(path),
        dagexec.compile(str(path)),
    ):
        with opened:
            assert [{k: v.tobytes() for k, v in opened.run(rows(count)).items()} for count in (1, 3)] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "inception_v1"])
def test_onnx_models_give_the_same_bytes(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blob, image = light_model_input(name)
    onnx.save(he_normal_light_model(name), tmp_path / "x.onnx")
    with dagexec.compile(tmp_path / "x.onnx") as executor:
        executor.save(tmp_path / "x.dagexec")
        wanted = {name: array.tobytes() for name, array in executor.run({blob: image}).items()}
    no_compiling(monkeypatch)
    assert run_of(dagexec.open(tmp_path / "x.dagexec"), {blob: image}) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"optimize": False},
        {"layout": "NCHW", "net_type": "simple"},
        {"keep": ["conv1"], "device": "cpu", "operator_arguments": {"exhaustive_search": 0}},
        {"max_batch": 4, "shapes": {"data": (2, 1, 28, 28)}},
    ],
    ids=str,
)
def test_what_compiling_was_asked_for_is_kept(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds = {"data": np.random.default_rng(0).standard_normal((2, 1, 28, 28), dtype=np.float32)}
    with dagexec.build("zoo:lenet", tmp_path / "x.dagexec", CompileOptions(**options)) as built:
        wanted = {name: array.tobytes() for name, array in built.run(feeds).items()}
        outputs, net_type, workers = options.get("keep"), built.net_type, built.num_workers
        others = None if outputs is None else built.run(feeds, outputs=outputs)
    no_compiling(monkeypatch)
    with dagexec.open(tmp_path / "x.dagexec") as opened:
        assert {name: array.tobytes() for name, array in opened.run(feeds).items()} == wanted
        assert (opened.net_type, opened.num_workers) == (net_type, workers)
        assert others is None or (opened.run(feeds, outputs=outputs)["conv1"] == others["conv1"]).all()


@needs_onednn
@pytest.mark.parametrize("name", ["zoo:lenet", pytest.param("zoo:resnet50", marks=pytest.mark.slow)])
def test_packed_weights_and_implementations_come_from_the_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    offered: list[object] = []
    packed = Constant.packed

    def counted(self: Constant, form: Hashable, nbytes: int, compute: Callable[[], Array]) -> Array:
        return packed(self, form, nbytes, lambda: made.append(form) or compute())

    path = tmp_path / "x.dagexec"
    monkeypatch.setattr(Constant, "packed", counted)
    with dagexec.build(name, path, CompileOptions()) as built:
        wanted = built.run(feeds := zero_feeds(built.model))
        chosen = chosen_implementations(built.net())
    assert made
    made.clear()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("chosen again")

    for module in ("convolution_family", "measured_product"):
        monkeypatch.setattr(f"dagexec.ops.engines.onednn.{module}.choose_implementation", refuse)
    monkeypatch.setattr(Constant, "can_be_made_by", lambda self, *_, **__: offered.append(self))
    with dagexec.open(path, replicas=2) as opened:
        found = opened.run(feeds)
        forms = [array for forms in packed_forms(opened._replicas.parameters).values() for array in forms.values()]
        opened.warm_up()  # the other replica, too
        assert [chosen_implementations(one.net) for one in opened._replicas.members] == [chosen, chosen]
    assert (made, {k: v.tobytes() for k, v in found.items()}) == ([], {k: v.tobytes() for k, v in wanted.items()})
    assert any(chosen)
    assert forms
    assert not offered, "plain values are in the file, too, and take no memory"
    assert all(is_in_file(array, path) for array in forms)


def test_errors_and_types_are_in_the_words_of_the_model_as_it_was_given(tmp_path: Path) -> None:
    open_model = onnx.ModelProto.FromString(SMALL.SerializeToString())
    open_model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "K"
    path, model = tmp_path / "x.dagexec", dagexec.load_model(open_model)
    dagexec.build(model, path, CompileOptions()).close()
    with dagexec.open(path) as opened, dagexec.compile(model) as compiled:
        assert (opened.inputs, opened.outputs) == (compiled.inputs, compiled.outputs)
        assert opened.output_info() == compiled.output_info()
        with pytest.raises(ShapeError) as wanted:
            compiled.run({"x": np.ones((2, 65), np.float32)})
        with pytest.raises(ShapeError) as found:
            opened.run({"x": np.ones((2, 65), np.float32)})
        assert str(found.value) == str(wanted.value)
        with pytest.raises(FeedError, match="is not kept"):
            opened.run(rows(), outputs=["a"])


@pytest.mark.slow
def test_the_same_model_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(SMALL.SerializeToString())
    script = "import sys, dagexec; dagexec.build(sys.argv[1], sys.argv[2], dagexec.CompileOptions()).close()"
    for number in ("1", "2"):
        call = [sys.executable, "-c", script, tmp_path / "x.onnx", tmp_path / f"{number}.dagexec"]
        subprocess.run(call, check=True, env=os.environ | {"PYTHONHASHSEED": number})
    assert (tmp_path / "1.dagexec").read_bytes() == (tmp_path / "2.dagexec").read_bytes()


def test_a_plan_that_was_opened_can_be_saved_again(path: Path, tmp_path: Path) -> None:
    with dagexec.open(path) as opened:
        opened.save(tmp_path / "again.dagexec")
        opened.save(path)  # over the file that it has mapped
        assert opened.run(rows())
    assert (tmp_path / "again.dagexec").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dagexec", "0.0.9"),
        ("NumPy", "1.0"),
        ("oneDNN", "3.1.0 SSE41"),
        ("NumPy's instruction set", "VSX"),
        ("BLAS", "x"),
    ],
)
def test_a_plan_of_another_version_or_processor_is_compiled_anew_with_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, key: str, value: str
) -> None:
    wanted = run_of(dagexec.open(path), rows())
    here = plans.made_with()
    monkeypatch.setattr(plans, "made_with", lambda: here | {key: value})
    assert run_of(dagexec.open(path), rows()) == wanted
    assert lines_of(caplog) == [f"{path}: compiled anew: it was made with {key} {here[key]}, found {value}"]


def test_with_another_number_of_cores_the_workers_are_chosen_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_compiling(monkeypatch)
    for module in ("dagexec.executor.opening", "dagexec.compiler.tuning.choosing.processor"):
        monkeypatch.setattr(f"{module}.available_cores", lambda: 1)
    with dagexec.open(path) as opened:
        assert (opened.net_type, opened.num_workers) == ("simple", 1)
    assert lines_of(caplog) == []


def test_options_of_running_may_be_others_and_those_that_decided_may_not(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = run_of(dagexec.open(path), rows())
    with monkeypatch.context() as patch:
        no_compiling(patch)
        with dagexec.open(path, replicas=3, num_workers=2) as opened:
            assert opened.statistics().replicas == 3
        with dagexec.Pool(2) as pool:
            assert run_of(dagexec.open(path, pool=pool), rows()) == wanted
            assert run_of(dagexec.compile(path, pool=pool, replicas=2), rows()) == wanted
    with pytest.raises(SettingError, match="dtype was decided when the plan was built"):
        dagexec.open(path, dtype="bfloat16")
    with pytest.raises(SettingError, match="'replcas' is no option for opening a plan; did you mean 'replicas'"):
        dagexec.open(path, replcas=2)
    with pytest.raises(SettingError, match="max_batch must be"):
        dagexec.open(path, max_batch=0)
    assert lines_of(caplog) == []
    with dagexec.compile(path, optimize=False) as anew:
        assert anew.run(rows(), outputs=["a"])["a"].shape == (3, 32)
    assert lines_of(caplog) == [f"{path}: compiled anew: it was made with optimize=True"]


def test_load_model_gives_the_model_that_a_plan_was_made_of(path: Path, model: Model) -> None:
    found = dagexec.load_model(path)
    assert (found.net, found.inputs, found.outputs) == (model.net, model.inputs, model.outputs)
    assert {k: v.tolist() for k, v in found.parameters.items()} == {k: v.tolist() for k, v in model.parameters.items()}


def test_replicas_and_processes_share_the_file_in_memory(path: Path) -> None:
    with dagexec.open(path, replicas=2) as opened:
        assert all(is_in_file(array, path) for array in opened.model.parameters.values())
        first, second = opened._replicas.members
        for name in opened.model.parameters:
            assert first.workspace.get_blob(name) is second.workspace.get_blob(name)


@pytest.mark.parametrize(
    "change", [Path.unlink, lambda path: dagexec.build("zoo:lenet", path, CompileOptions()).close()]
)
def test_a_plan_may_be_removed_or_replaced_while_it_is_open(path: Path, change: Callable[[Path], object]) -> None:
    wanted = run_of(dagexec.open(path), rows())
    opened = dagexec.open(path)
    change(path)
    assert run_of(opened, rows()) == wanted


@pytest.mark.slow
def test_a_calibrated_plan_is_opened_and_cannot_be_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, feeds = tmp_path / "x.dagexec", {"data": np.ones((1, 1, 28, 28), np.float32)}
    with dagexec.build("zoo:lenet", path, CompileOptions(dtype="int8", calibration=feeds)) as built:
        wanted = {name: array.tobytes() for name, array in built.run(feeds).items()}
    assert run_of(dagexec.open(path), feeds) == wanted
    here = plans.made_with()
    monkeypatch.setattr(plans, "made_with", lambda: here | {"NumPy": "1"})
    with pytest.raises(PlanError, match=r"made with NumPy .*, found 1; compiling anew needs inputs for calibration"):
        dagexec.open(path)
    with dagexec.compile(path, dtype="int8", calibration=feeds) as anew:
        assert {name: array.tobytes() for name, array in anew.run(feeds).items()} == wanted


def test_nothing_is_left_where_a_plan_cannot_be_written(tmp_path: Path, model: Model) -> None:
    with dagexec.compile(model) as executor, pytest.raises(dagexec.DagexecError, match="cannot be written"):
        executor.save(tmp_path / "no folder" / "x.dagexec")
    assert list(tmp_path.iterdir()) == []


def test_what_a_file_cannot_keep_is_refused(tmp_path: Path, model: Model) -> None:
    def refused(source: Any, what: str, **options: Any) -> None:
        with dagexec.compile(source, **options) as executor, pytest.raises(PlanError, match=what):
            executor.save(tmp_path / "x.dagexec")

    step = Pipeline("steps")
    step.output(
        "y", step.python("more", lambda x: x + 1, step.input("x", "float32", (None,)), TensorSpec("float32", (None,)))
    )
    on_device = Model("relu", NetDef(name="relu", op=[op("Relu", ["x"], ["y"])]), inputs=model.inputs, outputs=("y",))
    refused(step, "functions of the application")
    refused(SMALL, "the message that it was compiled from is not kept")
    refused(on_device, "it runs on devices", device="sim:0")
    assert list(tmp_path.iterdir()) == []


def test_a_model_file_that_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "x.onnx"
    source.write_bytes(SMALL.SerializeToString())
    with dagexec.compile(source) as executor:
        changed = onnx.ModelProto.FromString(SMALL.SerializeToString())
        changed.graph.node[6].op_type = "Tanh"
        source.write_bytes(changed.SerializeToString())
        with pytest.raises(PlanError, match="has another model now"):
            executor.save(tmp_path / "x.dagexec")


def damaged(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the manifest of a plan says."""
    plan, sections = taken_apart(path.read_bytes())
    assert isinstance(plan, dict)
    change(plan)
    path.write_bytes(put_together(plan, sections))


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.pop("given"),
        lambda plan: plan.update(more=1),
        lambda plan: plan.update(net_type=1),
        lambda plan: plan.update(cores=-1),
        lambda plan: plan["compiled"].update(net=10**6),
        lambda plan: plan["compiled"].update(net=plan["compiled"]["parameters"].popitem()[1][2]),
        lambda plan: plan["compiled"].update(outputs="y"),
        lambda plan: plan["compiled"]["inputs"]["x"].update(dtype="float31"),
        lambda plan: plan["compiled"].update(parameters=[]),
        lambda plan: [one.__setitem__(1, [3]) for one in plan["compiled"]["parameters"].values()],
        lambda plan: plan["options"].update(dtype="float8"),
        lambda plan: plan["made_with"].update(dagexec=1),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_refused(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    damaged(path, change)
    with pytest.raises(ModelFormatError, match=r"net\.dagexec: no plan, or a damaged one"):
        dagexec.open(path)


def test_a_net_type_that_does_not_exist_is_refused(path: Path) -> None:
    damaged(path, lambda plan: plan.update(net_type="fast"))
    with pytest.raises(ModelFormatError, match="net type 'fast'"):
        dagexec.open(path)


def test_the_fallback_does_not_take_weights_that_have_changed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(path.read_bytes())
    model = dagexec.load_model(path)
    large = max(model.parameters.values(), key=lambda array: array.nbytes)
    content[content.index(large.tobytes()) + 4] ^= 1
    path.write_bytes(content)
    here = plans.made_with()
    monkeypatch.setattr(plans, "made_with", lambda: here | {"NumPy": "1"})
    with pytest.raises(ModelFormatError, match="hash"):
        dagexec.open(path)
