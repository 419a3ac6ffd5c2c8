"""`dagexec check`: the table, the JSON, and exit status 1 with what is not ordered."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import dagexec
from dagexec import NetDef, OperatorDef
from dagexec.core.arguments import make_argument
from dagexec.core.device import Device
from dagexec.scheduler.exploration import run_states
from dagexec.scheduler.hazards import check
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.plan.synchronization import Synchronization, synchronize
from dagexec.scheduler.run.machine import Machine
from dagexec.training.optimizer import SGD
from dagexec.zoo import build_training
from tests.command_line import Cli
from tests.executor.decoders import CACHES, ELEMENTS, KEY_HEADS, decoder
from tests.models import light_model_path

LENET = Path(__file__).parents[2] / "fixtures" / "caffe2" / "lenet"


@pytest.fixture
def checked(cli: Cli) -> Cli:
    """`cli` for the command `check`."""
    return partial(cli, "check")


@pytest.mark.slow
def test_a_model_on_streams_is_proved(checked: Cli) -> None:
    status, out, _ = checked("zoo:squeezenet", "--net-type", "async_dag", "--device", "sim:0", "--streams", 4)
    assert status == 0
    assert "squeezenet: async_dag on sim:0" in out
    assert "Proved" in out
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in out.splitlines() if "│" in line}
    assert int(rows["operators"]) >= 67
    assert (rows["chains"], rows["waits for an event"], rows["unordered"]) == ("33", "40", "0")


def test_json_has_the_counts_and_the_guards(checked: Cli) -> None:
    status, out, _ = checked("zoo:squeezenet", "--set", "shared_buffer=1", "--num-workers", 3, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["holds"] is True
    assert found["unordered"] == []
    assert found["guards"] == {"shared buffer of sim:0": 26}
    assert (found["events"], found["waits"], found["dependencies"]) == (32, 40, 40)
    assert found["pairs_checked"] > 67
    assert found["seconds"] < 5


@pytest.mark.slow
def test_one_stream_needs_no_event(checked: Cli) -> None:
    _, out, _ = checked("zoo:squeezenet", "--streams", 1, "--json")
    found = json.loads(out)
    assert (found["events"], found["waits"], found["holds"]) == (0, 0, True)


@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_folder_of_caffe2_is_proved_for_every_net_type(checked: Cli, net_type: str, device: str) -> None:
    status, out, _ = checked(LENET, "--net-type", net_type, "--device", device, "--shape", "data=1,1,28,28", "--json")
    found = json.loads(out)
    assert (status, found["holds"], found["by_name"]) == (0, True, False)


@pytest.mark.slow
def test_the_net_of_a_step_is_proved_as_well(checked: Cli, tmp_path: Path) -> None:
    path = tmp_path / "decoder.onnx"
    path.write_bytes(decoder().SerializeToString())
    options = ["--device", "cpu", "--net-type", "dag", "--num-workers", 2, "--optimize"]
    for name in CACHES:
        options += ["--shape", f"{name}=1,{KEY_HEADS},20,{ELEMENTS}"]
    status, out, _ = checked(path, *options, "--json")
    step = json.loads(out)["instead"]
    assert (status, step["holds"], step["pairs_checked"] > 0) == (0, True, True)
    assert step["resources"] > 2 * len(CACHES)
    status, out, _ = checked(path, *options)
    assert "decoder: a step" in out


def test_two_operators_that_add_to_one_cache_are_not_ordered() -> None:
    """No net of a step has them (`test_stepping.py`)."""
    inputs = [f"{name}{number}" for number in (1, 2) for name in "qkv"]
    attend = [
        OperatorDef(
            type="CachedAttention",
            input=[*inputs[3 * number : 3 * number + 3], "cache", "length"], output=[f"y{number}"],
            arg=[make_argument("keys", "k"), make_argument("values", value)],
        )
        for number, value in enumerate(("v", "w"))
    ]  # fmt: skip
    net = NetDef(name="twice", op=attend, external_input=[*inputs, "cache", "length"])
    with dagexec.compile((NetDef(), net), optimize=False, net_type="dag", num_workers=2) as executor:
        (unordered,) = check.check_net(executor.net(), by_name=True).unordered
    assert "WAW on cache 'k'" in str(unordered)


def test_without_shapes_blobs_go_by_name_and_that_is_said(checked: Cli) -> None:
    status, out, _ = checked(LENET)
    assert status == 0
    assert "distinguished by name" in out
    assert "Proved" in out


def test_a_shape_for_what_is_no_input_is_refused_also_where_other_shapes_are_not_known(checked: Cli) -> None:
    status, out, err = checked(LENET, "--shape", "dada=1,1,28,28")
    assert (status, out) == (2, "")
    assert "shapes given for ['dada']; its inputs are ['data']" in " ".join(err.split())


@pytest.mark.slow
def test_an_onnx_file_is_proved(checked: Cli) -> None:
    status, out, _ = checked(light_model_path("squeezenet"), "--json")
    assert (status, json.loads(out)["holds"]) == (0, True)


@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_a_step_of_training_is_proved_with_labels_that_are_integers(
    checked: Cli, tmp_path: Path, net_type: str
) -> None:
    helper = build_training("lenet_digits", 4)
    helper.add_gradient_operators(["loss"])
    SGD(0.1, momentum=0.9, weight_decay=1e-4, max_gradient_norm=1.0).add_updates(helper)
    (tmp_path / "init_net.pb").write_bytes(helper.init_net.SerializeToString())
    (tmp_path / "predict_net.pb").write_bytes(helper.net.SerializeToString())
    shapes = ("--shape", "data=4,1,8,8", "--shape", "label=int32:4")
    status, out, err = checked(tmp_path, "--net-type", net_type, "--device", "sim:0", *shapes, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["holds"], found["by_name"]) == (True, False)


def test_a_net_on_several_devices_is_proved_with_the_copies_between_them(checked: Cli, tmp_path: Path) -> None:
    net = NetDef(name="mixed")
    places = [Device("sim", 0), Device("sim", 1), Device(), Device("sim", 0)]
    inputs: Sequence[Sequence[str]] = [[], ["b0"], ["b0"], ["b1", "b2"]]
    for index, (row, place) in enumerate(zip(inputs, places, strict=True)):
        kind, arguments = ("Add", {}) if index == 3 else ("Relu", {}) if index else ("ConstantFill", {"shape": [4]})
        operator = OperatorDef(type=kind, input=row, output=[f"b{index}"], device_option=place.to_option())
        for name, value in arguments.items():
            operator.arg.add(name=name, ints=value)
        net.op.append(operator)
    path = tmp_path / "mixed.pbtxt"
    dagexec.save_net(net, path)
    status, out, _ = checked(path, "--streams", 2, "--json")
    found = json.loads(out)
    assert (status, found["holds"]) == (0, True)
    assert found["operators"] > 4
    assert found["waits"] > 0


def without_waits_of(chain: int) -> Callable[..., Synchronization]:
    def synchronize_less(plan: Plan, guards: Sequence[tuple[str, ...]], streams: int | None = None) -> Synchronization:
        found = synchronize(plan, guards, streams)
        return replace(found, waits=tuple(() if c == chain else row for c, row in enumerate(found.waits)))

    return synchronize_less


@pytest.mark.slow
def test_what_is_not_ordered_is_printed_with_both_operators_and_the_missing_edge(
    checked: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "synchronize", without_waits_of(1))
    status, out, _ = checked("zoo:squeezenet", "--num-workers", 1, "--streams", 5)
    assert status == 1
    assert "Proved" not in out
    [line] = [line for line in out.splitlines() if line.startswith("RAW")]
    assert "chain 1 must wait for the event of chain 0" in line
    assert line.count("(operator") == 2
    assert line.startswith("RAW on blob '")
    _, out, _ = checked("zoo:squeezenet", "--num-workers", 1, "--streams", 5, "--json")
    [found] = json.loads(out)["unordered"]
    assert (found["kind"], found["missing"]) == ("RAW", "chain 1 must wait for the event of chain 0")


def test_a_device_that_does_not_exist_is_no_traceback(checked: Cli) -> None:
    status, _, err = checked("zoo:lenet", "--device", "tpu:0")
    assert status == 2
    assert "device 'tpu:0' is unknown" in err


def test_every_state_of_the_runs_of_a_model_is_proved_or_how_far_it_went_is_said(checked: Cli) -> None:
    setting = (LENET, "--device", "cpu", "--net-type", "dag", "--shape", "data=1,1,28,28", "--exhaustive")
    status, out, _ = checked(*setting, "--num-workers", 2, "--json")
    (space,) = json.loads(out)["exhaustive"]
    assert (status, space["proved"], space["workers"]) == (0, True, 2)
    assert space["found"]["states"] > space["tasks"]
    status, out, _ = checked(*setting, "--seconds", 0)
    assert status == 0
    assert "Not proved, time was up: no fault within 0 events" in out


def test_the_events_that_lead_to_a_fault_of_the_machine_are_listed_in_the_names_of_operators(
    checked: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LosesThePieces(Machine):
        def end(self, task: int, piece: int = -1) -> None:
            self._done[task] = -9

    monkeypatch.setattr(run_states, "machine_of", lambda graph, _workers: LosesThePieces(graph))
    status, out, _ = checked(LENET, "--device", "cpu", "--shape", "data=1,1,28,28", "--exhaustive")
    assert status == 1
    assert "1. worker 0 comes and takes" in out
    assert "tasks are left, but it says" in out
    assert "Conv" in out


def test_states_of_a_model_without_shapes_are_not_looked_at(checked: Cli) -> None:
    status, _, err = checked(LENET, "--exhaustive")
    assert status == 2
    assert "an input has no known shape" in " ".join(err.replace("│", "").split())
