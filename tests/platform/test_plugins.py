"""Plugins: entry points of a package in a folder on `sys.path`, found by name, and skipped where they are broken."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import dagexec
from dagexec.compiler.passes.own import PLUGINS as PASSES
from dagexec.core import device, gradient, operator_index, registry, runtime
from dagexec.core.operator_index import PLUGINS as OPERATORS
from dagexec.devices import Device, runtime_of
from dagexec.devices.host import HostRuntime
from dagexec.errors import ArgumentError, DagexecError, DeviceError, ModelFormatError, SettingError
from dagexec.executor.source.loading import PLUGINS as FRONTENDS
from dagexec.frontend.onnx import forms
from dagexec.platform.plugins import PluginGroup
from dagexec.scheduler.observe.installed import PLUGINS as OBSERVERS
from dagexec.scheduling import Fifo, find_policy, policy_names
from dagexec.scheduling.catalog import PLUGINS as POLICIES
from tests.command_line import Cli
from tests.held import PATIENCE, doubled_model

GROUPS_OF_PLUGINS: tuple[PluginGroup[Any], ...] = (OPERATORS, runtime.PLUGINS, PASSES, POLICIES, OBSERVERS, FRONTENDS)
X = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)

OPERATOR = """
from dagexec.operators import Expression, OnnxName, elementwise_operator, tanh

@elementwise_operator("{name}", gradient=("X", "dY"), onnx=OnnxName("{name}", 1, domain="own.example"))
def own(x: Expression) -> Expression:
    "Y = tanh(2 X)."
    return tanh(x * 2.0)
"""

Install = Callable[[Mapping[str, str], Mapping[str, Mapping[str, str]]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a package on the path: modules with their text, and groups of entry points. They are forgotten after it."""
    tables = (
        registry._schemas, registry._onnx, registry._operators, registry._implemented, registry._candidates,
        gradient._makers, operator_index._elsewhere, operator_index._loaded, device._numbers, runtime._kinds,
    )  # fmt: skip
    for name in ("own-plugins", "second"):
        monkeypatch.setattr(forms, "_known", {})  # of ONNX nodes
        (tmp_path / f"{name}-1.5.dist-info").mkdir()
    written: list[str] = []

    def put(modules: Mapping[str, str], groups: Mapping[str, Mapping[str, str]], package: str = "own-plugins") -> None:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        written.extend(modules)
        lines = [
            f"[dagexec.{group}]\n" + "\n".join(f"{k} = {v}" for k, v in one.items()) for group, one in groups.items()
        ]
        (tmp_path / f"{package}-1.5.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: 1.5\n")
        (tmp_path / f"{package}-1.5.dist-info" / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield put
    for table in tables:
        for key in [key for key in table if any(str(part).lower().startswith("own") for part in as_tuple(key))]:
            table.discard(key) if isinstance(table, set) else table.pop(key)
    for group in GROUPS_OF_PLUGINS:
        group._used.clear()
        group._problems.clear()
    for name in written:
        sys.modules.pop(name, None)


def as_tuple(key: object) -> tuple[object, ...]:
    return key if isinstance(key, tuple) else (key,)


def model(op_type: str) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy"]
    node = helper.make_node(op_type, ["x"], ["y"], domain="own.example")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own.example", 1)]
    return helper.make_model(helper.make_graph([node], "own", ends[:1], ends[1:]), opset_imports=opsets)


def test_an_operator_is_imported_when_its_type_is_asked_for_and_no_other_is(install: Install) -> None:
    modules = {"own_first": OPERATOR.format(name="OwnFirst"), "own_second": OPERATOR.format(name="OwnSecond")}
    install(modules, {"operators": {"OwnFirst": "own_first", "OwnSecond": "own_second"}})
    workspace = dagexec.Workspace()
    workspace.feed_blob("x", X)
    workspace.run_operator_once(dagexec.op("OwnFirst", ["x"], ["y"]))
    np.testing.assert_allclose(workspace.fetch_blob("y"), np.tanh(2 * X.astype(np.float64)), rtol=1e-5)
    assert "own_first" in sys.modules
    assert "own_second" not in sys.modules
    assert registry.registered_engines("OwnFirst") == registry.registered_engines("Celu")
    assert registry.is_registered("OwnFirstGradient")


@pytest.mark.slow
def test_an_operator_that_is_an_expression_is_one_on_cuda_whenever_it_comes(install: Install) -> None:
    assert registry.registered_engines("Celu", "cuda") == ["DEFAULT"]
    modules = {"own_first": OPERATOR.format(name="OwnFirst"), "own_second": OPERATOR.format(name="OwnSecond")}
    install(modules, {"operators": {"OwnFirst": "own_first"}})
    assert registry.registered_engines("OwnFirst", "cuda") == ["DEFAULT"]
    importlib.import_module("own_second")
    assert registry.registered_engines("OwnSecond", "cuda") == ["DEFAULT"]
    assert registry.registered_engines("OwnSecondGradient", "cuda") == ["DEFAULT"]


def test_a_node_of_onnx_is_the_operator_of_a_module_of_several(install: Install) -> None:
    several = OPERATOR.format(name="OwnThird") + OPERATOR.format(name="OwnFourth")
    install({"own_several": several}, {"operators": {"all-of-ours": "own_several"}})
    with dagexec.compile(model("OwnFourth"), foreign=False) as executor:
        found = executor.run({"x": X})["y"]
    np.testing.assert_allclose(found, np.tanh(2 * X.astype(np.float64)), rtol=1e-5)


def test_a_converter_of_a_plugin_converts(install: Install) -> None:
    converter = """
from dagexec.frontend.onnx import converts

@converts("own.example", OwnDouble=1)
def double(node):
    return [node.operator("Add", [node.inputs[0], node.inputs[0]], node.outputs)]
"""
    install({"own_converter": converter}, {"operators": {"own.example": "own_converter"}})
    with dagexec.compile(model("OwnDouble"), foreign=False) as executor:
        np.testing.assert_array_equal(executor.run({"x": X})["y"], X + X)


def test_a_thread_that_asks_while_another_imports_gets_the_whole_operator(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = """
from own_pause import pause
from dagexec.operators import operator, operator_class, schema_of

pause()
operator(schema_of("OwnFifth"), engine="LATE")(operator_class("OwnFifth"))
"""
    install({"own_fifth": OPERATOR.format(name="OwnFifth") + late}, {"operators": {"OwnFifth": "own_fifth"}})
    is_half_imported, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        """The plugin's module waits when it has registered the type, and not yet all that is of it."""
        is_half_imported.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setitem(sys.modules, "own_pause", SimpleNamespace(pause=pause))
    engines = registry.registered_engines("Celu")  # imports what any operator of its kind needs
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(registry.registered_engines, "OwnFifth")
        assert is_half_imported.wait(PATIENCE)
        second = pool.submit(registry.registered_engines, "OwnFifth")
        wait([second], timeout=0.1)  # which it should not be done in
        go_on.set()
        found = [one.result(PATIENCE) for one in (first, second)]
    assert found == [sorted([*engines, "LATE"])] * 2


BROKEN = {
    "own_missing": "import no_such_module_at_all\n",
    "own_taken": OPERATOR.format(name="ColwiseMax"),
    "own_exit": "import sys\nsys.exit(3)\n",
}


def test_broken_operators_are_named_with_their_package_and_skipped(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"A": "own_missing", "B": "own_taken", "C": "own_exit", "D": "own_ok", "E": "own_ok:nothing"}
    install(BROKEN | {"own_ok": OPERATOR.format(name="OwnSixth")}, {"operators": names})
    for _ in range(2):
        assert registry.is_registered("OwnSixth")
        OPERATORS.load()
    said = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert [line.partition(" is skipped")[0] for line in said] == [
        f"plugin '{name}' (dagexec.operators) of own-plugins 1.5" for name in "ABCE"
    ]
    assert "own_missing: ModuleNotFoundError: No module named 'no_such_module_at_all'" in said[0]
    assert "own_taken: SchemaError: operator type 'ColwiseMax' already has a schema" in said[1]
    assert "own_exit: SystemExit: 3" in said[2]
    assert registry.operator_module("ColwiseMax").startswith("dagexec.ops.")


OTHERS = """
from dagexec import Model, load_model
from dagexec.compiler.passes import Pass
from dagexec.devices import DeviceKind
from dagexec.devices.host import HostRuntime
from dagexec.scheduling import Fifo
from dagexec.tracing import Observer

class Own(Fifo):
    name = "own"

seen = []

class Seen(Observer):
    def run_stopped(self, run, end, error):
        seen.append(run.graph.name)

def to_second(draft):
    for number in draft.having(is_first):
        draft.changed("it is seen")

def is_first(schema):
    return schema.type == "Conv"

PASS = Pass("own-pass", "Sees convolutions.", to_second, needs=(is_first,))
KIND = DeviceKind("own", 4711, HostRuntime)
TAKEN = DeviceKind("sim", 4712, HostRuntime)
NUMBER = DeviceKind("other", 1, HostRuntime)

def read(path):
    name = path.read_text()
    return load_model(name) if name.startswith("zoo:") else name

WRONG = 3
"""
GROUPS = {
    "devices": {"own": "own_others:KIND", "sim": "own_others:TAKEN", "other": "own_others:NUMBER"},
    "passes": {"own-pass": "own_others:PASS", "dead-code": "own_others:PASS", "renamed": "own_others:PASS"},
    "policies": {"own": "own_others:Own", "heft": "own_others:Own", "wrong": "own_others:WRONG"},
    "observers": {"seen": "own_others:Seen", "wrong": "own_others:WRONG"},
    "frontends": {"own": "own_others:read", "onnx": "own_others:read", "wrong": "own_others:WRONG"},
    "polices": {"own": "own_others:Own"},
}


@pytest.fixture
def others(install: Install) -> None:
    install({"own_others": OTHERS}, GROUPS)


@pytest.mark.usefixtures("others")
def test_a_device_can_be_named() -> None:
    assert isinstance(runtime_of(Device.parse("own:1")), HostRuntime)
    assert Device.from_option(Device("own", 2).to_option()) == Device("own", 2)
    with pytest.raises(DeviceError, match=r"expected one of cpu, cuda:N, sim:N, own:N$"):
        Device.parse("other")


@pytest.mark.usefixtures("others")
def test_the_number_of_a_device_is_enough() -> None:
    option = dagexec.op("Relu", ["x"], ["y"]).device_option
    option.device_type = 4711
    assert Device.from_option(option) == Device("own")


@pytest.mark.usefixtures("others")
def test_a_pass_runs_where_it_is_named(cli: Cli) -> None:
    status, out, _ = cli("inspect", "zoo:lenet", "--pass", "own-pass", "--json")
    outcomes = {one["name"]: one["changes"] for one in json.loads(out)["passes"]}
    assert status == 0
    assert outcomes["own-pass"] == ["it is seen", "it is seen"]
    with pytest.raises(ArgumentError, match=r"no installed package has a pass 'own-pas'; .* did you mean 'own-pass'"):
        dagexec.compile(doubled_model(), passes=["own-pas"])
    with pytest.raises(ArgumentError, match=r"'renamed' .* of own-plugins 1.5 is skipped: .*expected a .*'renamed'"):
        dagexec.compile(doubled_model(), passes=["renamed"])


@pytest.mark.usefixtures("others")
def test_a_policy_has_its_name_and_takes_no_other() -> None:
    assert type(find_policy("own")).__name__ == "Own"
    assert isinstance(find_policy("own"), Fifo)
    assert {"own", "heft"} <= set(policy_names())
    assert not isinstance(find_policy("heft"), Fifo)
    with pytest.raises(SettingError, match=r"policy 'wrong' is unknown; .* of own-plugins 1.5 is skipped: .*found 3"):
        find_policy("wrong")


@pytest.mark.usefixtures("others")
def test_an_observer_is_told_of_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGEXEC_OBSERVERS", "seen")
    with dagexec.compile("zoo:lenet") as executor:
        executor.run({"data": np.zeros((1, 1, 28, 28), np.float32)})
    assert "lenet" in sys.modules["own_others"].seen
    monkeypatch.setenv("DAGEXEC_OBSERVERS", "sen")
    with pytest.raises(SettingError, match=r"no installed package has an observer 'sen'; .* did you mean 'seen'"):
        dagexec.Workspace().create_net(dagexec.NetDef(name="n"))


@pytest.mark.usefixtures("others")
def test_a_frontend_reads_files_of_its_suffix(tmp_path: Path) -> None:
    good, text, wrong = tmp_path / "model.own", tmp_path / "text.own", tmp_path / "model.wrong"
    good.write_text("zoo:lenet")
    text.write_text("nothing")
    wrong.write_text("nothing")
    assert dagexec.load_model(good).name == "lenet"
    with pytest.raises(ModelFormatError, match=r"text.own: the frontend for .own returned a str and no Model"):
        dagexec.load_model(text)
    with pytest.raises(ModelFormatError, match=r"unknown kind of file; .* of own-plugins 1.5 is skipped: .*found 3"):
        dagexec.load_model(wrong)
    text.unlink()
    text.mkdir()
    with pytest.raises(DagexecError, match=r"text.own"):
        dagexec.load_model(text)


@pytest.mark.usefixtures("others")
def test_the_command_lists_all_and_what_is_wrong(cli: Cli) -> None:
    status, out, _ = cli("plugins", "--json")
    rows = {(one["group"], one["name"]): one for one in json.loads(out)["plugins"]}
    assert status == 1
    assert {key for key, one in rows.items() if one["usable"]} == {
        ("dagexec.devices", "own"), ("dagexec.passes", "own-pass"), ("dagexec.policies", "own"),
        ("dagexec.observers", "seen"), ("dagexec.frontends", "own"),
    }  # fmt: skip
    assert len(rows) == sum(map(len, GROUPS.values()))
    for group, name in (("passes", "dead-code"), ("policies", "heft"), ("frontends", "onnx")):
        assert f"the name {name!r} is taken" in rows[f"dagexec.{group}", name]["problem"]
    assert "the kind of devices 'sim', number 20901, is there already" in rows["dagexec.devices", "sim"]["problem"]
    assert "the kind of devices 'cuda', number 1, is there already" in rows["dagexec.devices", "other"]["problem"]
    assert "there is no group dagexec.polices" in rows["dagexec.polices", "own"]["problem"]
    assert {one["package"] for one in rows.values()} == {"own-plugins"}
    status, out, _ = cli("plugins")
    assert status == 1
    assert "own-plugins 1.5" in out


@pytest.mark.usefixtures("others")
def test_off_there_are_none(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGEXEC_PLUGINS", "off")
    assert cli("plugins", "--json")[:2] == (0, '{"off": true, "plugins": []}\n')
    assert "DAGEXEC_PLUGINS=off" in cli("plugins")[1]
    assert "own" not in policy_names()
    with pytest.raises(SettingError, match="policy 'own' is unknown"):
        find_policy("own")


def test_the_first_of_two_packages_has_a_name(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install({"own_policy": "from dagexec.scheduling import Fifo, Lifo\n"}, {"policies": {"ours": "own_policy:Fifo"}})
    install({}, {"policies": {"ours": "own_policy:Lifo"}}, "second")  # type: ignore[call-arg]
    used = type(find_policy("ours")).__name__
    [message] = [record.getMessage() for record in caplog.records]
    first, other = ("own-plugins", "second") if used == "Fifo" else ("second", "own-plugins")
    assert f"of {other} 1.5 is skipped" in message
    assert f"the name is that of plugin 'ours' (dagexec.policies) of {first} 1.5 already" in message


def test_a_damaged_package_hides_no_other(install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    install({"own_policy": "from dagexec.scheduling import Fifo\n"}, {"policies": {"ours": "own_policy:Fifo"}})
    install({}, {}, "second")  # type: ignore[call-arg]
    (tmp_path / "second-1.5.dist-info" / "entry_points.txt").write_bytes(b"[dagexec.policies]\nours\xff\n")
    assert isinstance(find_policy("ours"), Fifo)
    assert any("plugins of a package are skipped" in record.getMessage() for record in caplog.records)
