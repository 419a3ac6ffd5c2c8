"""The command line as a user meets it: tables, JSON, files, exit statuses, and no traceback for bad input."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rich.console import Console

import dagexec
from dagexec import NetDef
from dagexec.analysis.comparison import Comparison, RuntimeResult
from dagexec.analysis.statistics import Finding, Verdict
from dagexec.analysis.what_if import CostModel
from dagexec.cli.arguments import parse_arguments
from dagexec.cli.compare import compare_table
from dagexec.core.choices import choices
from dagexec.core.operator import Operator, Step
from dagexec.ops.families.conv import search
from dagexec.storage.net_file import save_net
from tests.command_line import Cli
from tests.nets import temporary_operator
from tests.ops.running import operator_def

FIXTURES = Path(__file__).parents[1] / "fixtures" / "caffe2"
GIVEN = ("--no-optimize",)


@pytest.mark.slow
def test_a_command_ends_without_passes_over_all_objects() -> None:
    told = "atexit.register(lambda: print(gc.get_freeze_count() > 10_000))"
    program = (
        f"import atexit, gc, sys\n{told}\nsys.argv = ['dagexec', '--version']\nfrom dagexec.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


@pytest.mark.slow
def test_export_writes_a_model_that_gives_the_same(cli: Cli, tmp_path: Path) -> None:
    status, out, _ = cli("export", "zoo:lenet", str(tmp_path / "lenet.onnx"))
    assert (status, out) == (0, f"lenet: 8 operators written to {tmp_path / 'lenet.onnx'}\n")
    status, out, _ = cli("run", str(tmp_path / "lenet.onnx"), "--json")
    assert status == 0
    assert [output["shape"] for output in json.loads(out)["outputs"].values()] == [[1, 10]]


def test_run_shows_the_outputs(cli: Cli) -> None:
    status, out, _ = cli("run", "zoo:lenet", "--net-type", "async_dag")
    assert status == 0
    assert re.search(r"softmax .* float32 .* \[1, 10\]", out)


def test_run_saves_outputs_and_reads_inputs(cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "out.npz"
    status, out, _ = cli(
        "run", FIXTURES / "lenet", "--input", FIXTURES / "lenet" / "inputs.npz", "--output", output, "--json"
    )
    assert status == 0
    summary = json.loads(out)
    with np.load(output) as found, np.load(FIXTURES / "lenet" / "outputs.npz") as expected:
        assert set(found.files) == set(expected.files) == set(summary["outputs"])
        for name in expected.files:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)
            assert summary["outputs"][name]["shape"] == list(expected[name].shape)


def test_run_writes_a_trace_that_is_json(cli: Cli, tmp_path: Path) -> None:
    status, _, _ = cli("run", "zoo:lenet", "--trace", tmp_path / "trace.json", "--repeat", 2)
    assert status == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"Conv", "MaxPool", "Softmax"} <= {event["name"] for event in events}


def test_a_trace_on_a_simulated_device_has_the_times_that_operators_are_estimated_to_take(
    cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    assert cli("run", "zoo:lenet", *GIVEN, "--net-type", "async_dag", "--device", "sim:0", "--trace", file)[0] == 0
    kernels = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    computed = [event for event in kernels if event["name"] in ("Conv", "FC", "MaxPool", "Softmax")]
    assert len(computed) == 7
    assert all(event["dur"] > 0 for event in computed)


def test_printed_lines_are_not_broken_by_a_display(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGEXEC_TRACE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    status, _, err = cli("run", "zoo:lenet", *GIVEN, "--repeat", 2)
    assert status == 0
    assert len(re.findall(r"lenet\[\d\] .* ms .* GB/s$", err, re.MULTILINE)) == 3 * 8
    assert "Running" not in err


def test_a_run_that_fails_leaves_its_trace(cli: Cli, tmp_path: Path) -> None:
    def body(operator: Operator) -> None:
        raise ValueError("no")

    net = NetDef(name="failing", op=[operator_def("Failing", ["x"], ["y"])])
    model, file = tmp_path / "net.pbtxt", tmp_path / "trace.json"
    save_net(net, model)
    with temporary_operator("Failing", body):
        status, _, err = cli("run", model, "--shape", "x=2", "--trace", file)
    assert (status, "Traceback" in err) == (2, False)
    failures = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("cat") == "failure"]
    assert [event["name"] for event in failures] == ["run failed: OperatorError"]


def test_the_tables_of_compare_fit_80_columns_with_large_figures_too() -> None:
    def row(workers: int, milliseconds: float, difference: float, same: bool) -> RuntimeResult:
        times = milliseconds, milliseconds * 0.99, milliseconds * 1.2, milliseconds * 1.1
        return RuntimeResult("async_dag", workers, 12345, *times, 1.1, 99.99, 1.0, 15.31, difference, same)

    rows = row(1, 12345.678, 1.2345e-07, False), row(99, 912345.6, float("inf"), False), row(2, 1.25, 0.0, True)
    rows = *rows[:2], replace(rows[2], verdict=Verdict(1 / 99.99, 1 / 119.99, 1 / 79.99, Finding.FASTER, 0.3))
    comparison = Comparison("m", 12345, 15, rows, CostModel((1.0,)))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(compare_table(comparison))
    text = console.export_text()
    assert "…" not in text
    assert re.search(r"^async_dag +12345 +1 +12346 +2592.6 +13580 +1.10 +99.99 +15.31 +1.2e-07 *$", text, re.MULTILINE)
    assert re.search(r"^async_dag +12345 +99 +912346 +191593 +1003580 .* inf *$", text, re.MULTILINE)
    assert re.search(r"^async_dag +12345 +2 +1.25 +0.26 +1.38 .* 0 *\n +79.99- *\n +119.99 *$", text, re.MULTILINE)


def test_compare_prints_a_row_for_each_runtime(cli: Cli) -> None:
    status, out, _ = cli("compare", "zoo:lenet", "--repeat", 3, "--num-workers", "1,2")
    assert status == 0
    for runtime in ("simple", "dag", "async_dag"):
        assert len(re.findall(rf"^ *{runtime} .* 0 *$", out, re.MULTILINE)) == (1 if runtime == "simple" else 2)


@pytest.mark.slow
def test_compare_gives_json_with_every_figure(cli: Cli, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    status, out, _ = cli("compare", "zoo:lenet", "--repeat", 3, "--net-type", "dag", "--json", "--plot", plot)
    assert status == 0
    rows = json.loads(out)["rows"]
    assert [(row["net_type"], row["workers"]) for row in rows] == [("simple", 1), ("dag", 1), ("dag", 2)]
    for row in rows:
        assert row["median_ms"] > 0
        assert row["same_bytes"] is True
        assert row["largest_difference"] == 0
        assert row["predicted"] <= row["bound"] + 1e-9
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_compare_exits_1_when_results_differ(cli: Cli, tmp_path: Path) -> None:
    drift = [0.0]

    def body(operator: Operator) -> None:
        drift[0] += 1
        operator.y(0)[...] = drift[0]

    save_model(tmp_path, NetDef(name="n", op=[operator_def("Drift", ["x"], ["y"])], external_input=["x"]))
    with temporary_operator("Drift", body):
        status, out, err = cli("compare", tmp_path, "--shape", "x=1", "--repeat", 1)
    assert status == 1
    assert "results differ" in err
    assert re.search(r"^ *dag .* 1 *$", out, re.MULTILINE)


def test_inspect_lists_operators_shapes_and_work(cli: Cli) -> None:
    status, out, _ = cli("inspect", "zoo:lenet")
    assert status == 0
    assert re.search(r"\d+ operators in \d+ chains", out)
    assert "431,080 parameters" in out
    assert "float32[1, 20, 24, 24]" in out


@pytest.mark.slow
def test_inspect_gives_json_and_draws(cli: Cli, tmp_path: Path) -> None:
    for name, magic in (("net.png", b"\x89PNG"), ("net.dot", b"digraph")):
        status, out, _ = cli("inspect", "zoo:lenet", "--json", "--draw", tmp_path / name)
        assert status == 0
        assert (tmp_path / name).read_bytes().startswith(magic)
    report = json.loads(out)
    assert sorted(index for chain in report["chains"] for index in chain) == list(range(len(report["operators"])))
    assert report["flops"] == sum(operator["flops"] for operator in report["operators"])


def test_operators_lists_them_and_explains_one(cli: Cli) -> None:
    status, out, _ = cli("operators")
    assert status == 0
    assert "Conv" in out
    assert "Relu" in out
    status, out, _ = cli("operators", "Relu")
    assert (status, "Y = max(X, 0)" in out) == (0, True)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The algorithms that were measured for each convolution; DIRECT is the fastest."""
    asked: list[list[str]] = []

    def measure(steps: dict[str, Step]) -> dict[str, float]:
        asked.append(sorted(steps))
        return {name: 0.5 if name == "DIRECT" else 1.0 for name in steps}

    monkeypatch.setattr(search, "measure", measure)
    choices.forget()
    yield asked
    choices.forget()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "compare"])
def test_set_gives_an_argument_to_the_operators_that_know_it(cli: Cli, measured: list[list[str]], command: str) -> None:
    assert cli(command, "zoo:lenet", *GIVEN, "--repeat", 1)[0] == 0
    assert measured == []
    assert cli(command, "zoo:lenet", *GIVEN, "--repeat", 1, "--set", "exhaustive_search=1")[0] == 0
    assert len(measured) == 2
    choices.forget()
    both = ("--set", "exhaustive_search=1", "--set", "deterministic=1")
    assert cli(command, "zoo:lenet", *GIVEN, "--repeat", 1, *both)[0] == 0
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("group=2", 2), ("group=-1", -1), ("alpha=0.5", 0.5), ("alpha=1e-3", 1e-3), ("max=inf", float("inf")),
        ("order=NHWC", "NHWC"), ("name=a=b", "a=b"), ("pads=1,2", "1,2"),
    ],
)  # fmt: skip
def test_a_value_is_an_integer_or_a_float_or_a_string(text: str, value: float | str) -> None:
    (found,) = parse_arguments([text]).values()
    assert (type(found), found) == (type(value), value)


def test_inspect_shows_the_model_with_the_arguments_set(cli: Cli, tmp_path: Path) -> None:
    path = unary_net(tmp_path, "Flatten", "y")
    for options, shape in (((), "float32[2, 12]"), (("--set", "axis=2"), "float32[6, 4]")):
        status, out, err = cli("inspect", path, "--shape", "x[red]=2,3,4", *options)
        assert (status, shape in out) == (0, True), err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "compare"])
def test_choices_are_kept_in_a_file_and_read_from_it(
    cli: Cli, measured: list[list[str]], tmp_path: Path, command: str
) -> None:
    file = tmp_path / "choices.json"
    options = ("zoo:lenet", *GIVEN, "--repeat", 1, "--choices", file)
    assert cli(command, *options)[0] == 0
    assert not file.exists(), "nothing was measured"
    assert cli(command, *options, "--set", "exhaustive_search=1")[0] == 0
    kept = json.loads(file.read_text())["choices"]
    assert list(kept.values()) == ["DIRECT", "DIRECT"]
    assert len(measured) == 2
    choices.forget()
    file.write_text(file.read_text().replace("DIRECT", "FFT"))
    assert cli(command, *options, "--set", "exhaustive_search=1")[0] == 0
    assert len(measured) == 2, "measured again, although the file has the choices"
    assert set(choices.all().values()) == {"FFT"}


@pytest.mark.slow
def test_choices_of_other_shapes_stay_in_the_file(cli: Cli, measured: list[list[str]], tmp_path: Path) -> None:
    file, model = tmp_path / "choices.json", tmp_path / "net.pb"
    convolution = operator_def("Conv", ["x", "w"], ["y"], kernel=3)
    dagexec.save_net(NetDef(name="n", op=[convolution], external_input=["x", "w"], external_output=["y"]), model)
    for count, size in enumerate((8, 9, 8), 1):
        shapes = ("--shape", f"x=1,2,{size},8", "--shape", "w=3,2,3,3")
        assert cli("run", model, *GIVEN, *shapes, "--set", "exhaustive_search=1", "--choices", file)[0] == 0
        choices.forget()
        assert len(json.loads(file.read_text())["choices"]) == len(measured) == min(count, 2)


def test_a_run_that_fails_leaves_the_choices_as_they_were(cli: Cli, measured: list[list[str]], tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    status, _, err = cli("run", "zoo:lenet", "--set", "ws_nbytes_limit=0.5", "--choices", file)
    assert (status, "'ws_nbytes_limit' must be an integer" in " ".join(err.split())) == (2, True), err
    assert not file.exists()
    file.write_text("{}")
    status, _, err = cli("run", "zoo:lenet", "--choices", file)
    assert (status, "expected a file of dagexec choices" in " ".join(err.split())) == (2, True), err
    assert file.read_text() == "{}"


def test_a_folder_that_is_not_there_is_found_before_anything_is_measured(
    cli: Cli, measured: list[list[str]], tmp_path: Path
) -> None:
    file = tmp_path / "nowhere" / "choices.json"
    status, _, err = cli("run", "zoo:lenet", "--set", "exhaustive_search=1", "--choices", file)
    assert (status, "is not a folder" in " ".join(err.split())) == (2, True), err
    assert measured == []


@pytest.mark.parametrize("command", ["run", "compare", "inspect", "operators"])
def test_every_command_has_help(cli: Cli, command: str) -> None:
    status, out, _ = cli(command, "--help")
    assert status == 0
    assert "Usage" in out


def save_model(folder: Path, net: NetDef, init: NetDef | None = None) -> Path:
    dagexec.save_net(net, folder / "predict_net.pb")
    dagexec.save_net(init or NetDef(name="init"), folder / "init_net.pb")
    return folder


def truncated_file(folder: Path) -> Path:
    source = (FIXTURES / "lenet" / "predict_net.pb").read_bytes()
    (folder / "predict_net.pb").write_bytes(source[: len(source) // 2])
    (folder / "init_net.pb").write_bytes((FIXTURES / "lenet" / "init_net.pb").read_bytes())
    return folder


def random_bytes(folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(np.random.default_rng(0).bytes(4096))
    return path


def unknown_operator(folder: Path) -> Path:
    return save_model(folder, NetDef(name="n", op=[operator_def("Convolve", ["x"], ["y"])], external_input=["x"]))


def wrong_arity(folder: Path) -> Path:
    return save_model(folder, NetDef(name="n", op=[operator_def("Conv", ["x"], ["y"])], external_input=["x"]))


def missing_blob(folder: Path) -> Path:
    return save_model(folder, NetDef(name="n", op=[operator_def("Relu", ["nowhere"], ["y"])], external_input=["x"]))


def cycle(folder: Path) -> Path:
    return save_model(
        folder,
        NetDef(
            name="n",
            op=[operator_def("Add", ["x", "b"], ["a"]), operator_def("Relu", ["a"], ["b"])],
            external_input=["x"],
        ),
    )


def shapes_that_do_not_fit(folder: Path) -> Path:
    init = NetDef(name="init", op=[operator_def("ConstantFill", [], ["w"], shape=[7], value=1.0)])
    return save_model(
        folder, NetDef(name="n", op=[operator_def("Add", ["x", "w"], ["y"])], external_input=["x", "w"]), init
    )


def external_data_outside(folder: Path) -> Path:
    (folder / "secret.bin").write_bytes(bytes(16))
    inner = folder / "model"
    inner.mkdir()
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "../secret.bin"), ("offset", "0"), ("length", "16")):
        weight.external_data.add(key=key, value=value)
    kind = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", kind[:1], kind[1:], [weight])
    (inner / "model.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    return inner / "model.onnx"


def too_large_for_memory(folder: Path) -> Path:
    init = NetDef(name="init", op=[operator_def("ConstantFill", [], ["w"], shape=[1 << 40, 1 << 10], value=1.0)])
    net = NetDef(name="n", op=[operator_def("Add", ["x", "w"], ["y"])], external_input=["x", "w"])
    return save_model(folder, net, init)


def nan_in_a_size(folder: Path) -> Path:
    resize = operator_def("ResizeNearest", ["x"], ["y"], width_scale=float("nan"), height_scale=2.0)
    return save_model(folder, NetDef(name="n", op=[resize], external_input=["x"]))


BAD_MODELS = {
    truncated_file: r"ModelFormatError: .*predict_net\.pb: not a NetDef",
    random_bytes: r"ModelFormatError: .*model\.onnx",
    unknown_operator: r"UnsupportedOperatorError: Convolve 'y' \(operator 0\) of net 'n': .*close names: .*Conv",
    wrong_arity: r"SchemaError: Conv 'y' \(operator 0\) of net 'n': expected 2 to 3 input\(s\), found 1",
    missing_blob: r"(MissingBlobError|ModelFormatError|FeedError): .*'nowhere'",
    cycle: r"CycleError: net 'n': .*in a cycle: .*Add 'a' \(operator 0\)",
    shapes_that_do_not_fit: r"ShapeError: Add 'y' \(operator 0\) of net 'n': .*\[7\]",
    external_data_outside: r"ModelFormatError: .*secret\.bin",
    too_large_for_memory: r"ResourceError: .*ConstantFill 'w' \(operator 0\)|ResourceError: .*1099511627776, 1024",
    nan_in_a_size: r"(ArgumentError|ShapeError): ResizeNearest 'y' .*width_scale.*(not a number|nan)",
}


@pytest.mark.parametrize("make", BAD_MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("command", ["run", "compare"])
def test_bad_models_end_with_one_clear_message_and_status_2(
    cli: Cli, tmp_path: Path, make: Callable[[Path], Path], command: str
) -> None:
    status, out, err = cli(command, make(tmp_path), "--shape", "x=1,2,3,4")
    text = " ".join(err.split())
    assert status == 2, text
    assert re.search(BAD_MODELS[make], text), text
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"data": np.zeros((1, 1, 28, 28), np.float64)}, "FeedError|ShapeError"),
        ({"data": np.zeros((1, 3, 28, 28), np.float32)}, "FeedError|ShapeError"),
        ({"image": np.zeros((1, 1, 28, 28), np.float32)}, r"FeedError: .*unknown input\(s\) \['image'\]"),
    ],
)
def test_wrong_feeds_end_with_one_clear_message_and_status_2(
    cli: Cli, tmp_path: Path, feeds: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "in.npz", **feeds)
    status, _, err = cli("run", "zoo:lenet", "--input", tmp_path / "in.npz")
    assert (status, bool(re.search(message, " ".join(err.split())))) == (2, True), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing.onnx"], "ModelFormatError: .*nothing.onnx"),
        (["run", "zoo:lenot"], "lenet"),
        (["run", "zoo:lenet", "--net-type", "fast"], "'fast' is unknown"),
        (["run", "zoo:lenet", "--input", "nothing.npz"], "FeedError: nothing.npz"),
        (["run", "zoo:lenet", "--shape", "data=1,x"], "expected NAME=SIZE,SIZE"),
        (["run", "zoo:lenet", "--shape", "data=int33:1,2"], "or NAME=TYPE:SIZE,SIZE"),
        (["run", "zoo:lenet", "--shape", "data=:1,2"], "or NAME=TYPE:SIZE,SIZE"),
        (["run", "zoo:lenet", "--shape", "picture=1"], r"\['picture'\]"),
        (["compare", "zoo:lenet", "--num-workers", "0"], "expected counts of 1 or more"),
        (["run", "zoo:lenet", "--trace", "nowhere/trace.json"], "nowhere"),
        (["run", "zoo:lenet", "--trace", "pyproject.toml/trace.json"], "pyproject.toml/trace.json: cannot be written"),
        (["run", "zoo:lenet", "--trace", ""], "cannot be written"),
        (["run", "zoo:lenet", "--seed", "-1"], "seed"),
        (["run", "zoo:lenet", "--shape", "data=999999,999999,99"], "ResourceError: .*'data'"),
        (["inspect", "zoo:lenet", "--shape", "data=99999999999999999999"], "ResourceError: .*overflows"),
        (["run", "zoo:lenet", "--set", "exhaustive_search"], "--set 'exhaustive_search': expected NAME=VALUE"),
        (["compare", "zoo:lenet", "--set", "=1"], "--set '=1': expected NAME=VALUE"),
        (["inspect", "zoo:lenet", "--set", "group="], "--set 'group=': expected NAME=VALUE"),
        (["run", "zoo:lenet", "--set", "group=1", "--set", "group=2"], "group is given twice, first as 1"),
        (["run", "zoo:lenet", "--set", "exhaustive=1"], r"no operator knows the argument\(s\) exhaustive"),
        (["compare", "zoo:lenet", "--set", "exhaustive=1"], r"no operator knows the argument\(s\) exhaustive"),
        (["inspect", "zoo:lenet", "--set", "exhaustive=1"], r"no operator knows the argument\(s\) exhaustive"),
        (["run", "zoo:lenet", "--set", "group=two"], "'group' must be an integer; found a string"),
        (["run", "zoo:lenet", "--set", f"group={1 << 64}"], "'group'.*18446744073709551616"),
        (["compare", "zoo:lenet", "--set", "group=" + "9" * 5000], "'group' must be an integer"),
        (["run", "zoo:lenet", "--choices", "tests"], "ModelFormatError: tests: .*cannot be read"),
        (["compare", "zoo:lenet", "--choices", "pyproject.toml"], "ModelFormatError: pyproject.toml: .*cannot be read"),
        (["run", "[/red]"], r"ModelFormatError: \[/red\]: no such file"),
        (["inspect", "zoo:lenet", "--draw", "nowhere/net.dot"], "nowhere"),
        (["operators", "Relo"], "close names: .*Relu"),
    ],
)
def test_wrong_usage_ends_with_one_clear_message_and_status_2(cli: Cli, arguments: list[str], message: str) -> None:
    status, _, err = cli(*arguments)
    assert (status, bool(re.search(message, " ".join(err.split())))) == (2, True), err


@pytest.mark.slow
def test_the_installed_script_prints_no_traceback(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "dagexec", "run", random_bytes(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert onnx.__name__ not in result.stdout


def test_an_input_file_of_another_kind_ends_with_status_2(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "in.npz"
    file.write_bytes(b"")
    assert_refused(*cli("run", "zoo:lenet", "--input", file))
    with file.open("wb") as single:
        np.save(single, np.zeros(3))
    assert_refused(*cli("run", "zoo:lenet", "--input", file))
    np.savez_compressed(file, data=np.arange(1000.0))
    content = bytearray(file.read_bytes())
    content[60:90] = bytes(30)
    file.write_bytes(content)
    assert_refused(*cli("run", "zoo:lenet", "--input", file))


def assert_refused(status: int, _out: str, err: str) -> None:
    assert (status, "not an .npz file of arrays" in " ".join(err.split())) == (2, True), err


def unary_net(folder: Path, op_type: str, output: str) -> Path:
    path = folder / "net.pb"
    net = NetDef(name="n[/b]", op=[operator_def(op_type, ["x[red]"], [output])], external_input=["x[red]"])
    net.external_output.append(output)
    dagexec.save_net(net, path)
    return path


@pytest.mark.parametrize("command", ["run", "compare --repeat 1", "inspect"])
def test_names_that_look_like_markup_are_shown_as_they_are(cli: Cli, tmp_path: Path, command: str) -> None:
    status, out, err = cli(*command.split(), unary_net(tmp_path, "Relu", "y[/red]"), "--shape", "x[red]=3")
    assert status == 0, err
    assert ("y[/red]" in out) is not command.startswith("compare")


def strict_json(text: str) -> object:
    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_stays_json_when_outputs_are_not_numbers(cli: Cli, tmp_path: Path) -> None:
    path, feeds = unary_net(tmp_path, "Log", "y"), tmp_path / "in.npz"
    np.savez(feeds, **{"x[red]": np.array([-1, 1], np.float32)})
    status, out, _ = cli("run", path, "--input", feeds, "--json")
    assert status == 0
    assert strict_json(out)["outputs"]["y"]["mean"] == "NaN"
    np.savez(feeds, **{"x[red]": np.array([0, 1], np.float32)})
    _, out, _ = cli("run", path, "--input", feeds, "--json")
    assert strict_json(out)["outputs"]["y"] == {
        "dtype": "float32", "shape": [2], "min": "-Infinity", "max": 0.0, "mean": "-Infinity"
    }  # fmt: skip
    status, out, _ = cli("compare", path, "--input", feeds, "--json", "--repeat", 1)
    assert (status, strict_json(out)["rows"][1]["same_bytes"]) == (0, True)


@pytest.mark.parametrize("output", ["file", "args", "allow_pickle", "scope/y"])
def test_outputs_of_any_name_are_saved(cli: Cli, tmp_path: Path, output: str) -> None:
    saved = tmp_path / "out.npz"
    status, _, err = cli("run", unary_net(tmp_path, "Relu", output), "--shape", "x[red]=3", "--output", saved)
    assert status == 0, err
    with np.load(saved) as arrays:
        assert arrays.files == [output]
        assert arrays[output].shape == (3,)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_with_one_message_and_status_2() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "dagexec", "inspect", "zoo:lenet"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (result.returncode, "Traceback" in result.stderr) == (2, False), result.stderr
    assert "No space left" in result.stderr
