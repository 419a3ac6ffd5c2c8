"""op: an OperatorDef from Python values."""

from __future__ import annotations

import numpy as np
import pytest

import dagexec
from dagexec import NetDef
from dagexec.core.device import Device
from dagexec.core.node import arguments_of
from dagexec.core.operator_def import OpValue
from dagexec.errors import ArgumentError, DeviceError


def test_the_kind_of_an_argument_follows_from_its_value() -> None:
    net = NetDef(name="inner")
    made = dagexec.op(
        "Any", ["x", "w"], ["y"], i=3, f=3.0, s="text", raw=b"\xff", ints=[1, 2], floats=[1, 2.5], strings=["a"],
        net=net, nets=[net, net], truth=True, none=None,
    )  # fmt: skip
    read = arguments_of(made, "Any")
    assert (list(made.input), list(made.output)) == (["x", "w"], ["y"])
    assert (read.int("i", 0), read.float("f", 0), read.string("s", ""), read.int("truth", 0)) == (3, 3.0, "text", 1)
    assert (read.ints("ints"), read.floats("floats"), read.strings("strings")) == ([1, 2], [1, 2.5], ["a"])
    assert read.net("net") == net
    arguments = {arg.name: arg for arg in made.arg}
    assert arguments["raw"].s == b"\xff"
    assert list(arguments["nets"].nets) == [net, net]
    assert "none" not in arguments


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int32(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([[1, 2], [3, 4]]), [1, 2, 3, 4]),
        (np.array([0.5, 1], np.float32), [0.5, 1.0]),
        ([np.int64(1), np.int64(2)], [1, 2]),
        (np.array([b"a", b"b"], object), [b"a", b"b"]),
    ],
)
def test_numpys_values_are_pythons(value: OpValue, plain: OpValue) -> None:
    assert dagexec.op("Any", value=value) == dagexec.op("Any", value=plain)


def test_everything_else_of_a_definition() -> None:
    made = dagexec.op(
        "Any", "x", "y", name="one", engine="ONEDNN", device_option="sim:1", control_input="z", arg={"name": "label"}
    )
    assert (list(made.input), list(made.output), list(made.control_input)) == (["x"], ["y"], ["z"])
    assert (made.name, made.engine) == ("one", "ONEDNN")
    assert Device.from_option(made.device_option) == Device("sim", 1)
    assert arguments_of(made, "Any").string("name", "") == "label"
    for device in (Device("sim", 1), Device("sim", 1).to_option()):
        assert dagexec.op("Any", device_option=device).device_option == made.device_option


def test_what_is_left_out_is_not_there() -> None:
    made = dagexec.op("Any")
    assert made == dagexec.OperatorDef(type="Any")
    assert not made.HasField("device_option")


def test_what_no_argument_can_hold_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="Conv: argument 'kernel': a dict cannot be an operator argument"):
        dagexec.op("Conv", kernel={})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"Conv: argument 'kernel': .* does not fit an int64"):
        dagexec.op("Conv", kernel=2**63)
    with pytest.raises(ArgumentError, match="argument 'kernel' is given twice"):
        dagexec.op("Conv", kernel=3, arg={"kernel": 3})
    with pytest.raises(ArgumentError, match="expected the name of a blob as input, found 3"):
        dagexec.op("Conv", ["x", 3])  # type: ignore[list-item]
    with pytest.raises(DeviceError, match="'gpu' is unknown"):
        dagexec.op("Conv", device_option="gpu")


def test_a_net_of_such_operators_runs() -> None:
    net = NetDef(name="small", external_input=["x"], external_output=["y"])
    net.op.extend([dagexec.op("Relu", "x", "r"), dagexec.op("Scale", "r", "y", scale=2.0)])
    with dagexec.compile(net) as executor:
        np.testing.assert_array_equal(executor.run({"x": np.array([-1, 2], np.float32)})["y"], [0, 4])
