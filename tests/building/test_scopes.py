"""What scopes say of names, devices, arguments and parameters, and by which tags parameters are selected."""

from __future__ import annotations

import pytest

from dagexec.building.fillers import gaussian
from dagexec.building.model_builder import ModelBuilder
from dagexec.core.device import Device
from dagexec.core.node import arguments_of
from dagexec.errors import DeviceError, SchemaError


def test_names_in_a_scope_begin_with_it_and_inputs_are_found_from_the_inside_out() -> None:
    builder = ModelBuilder("m")
    outer = builder.add_input("x", (1, 2))
    with builder.name_scope("left"):
        inner = builder.add_input("x", (1, 2))
        y = builder.fc("x", "y", 2, 2)
        with builder.name_scope("deep"):
            z = builder.relu("y", "z")
            same = builder.relu(z, z)
        w = builder.relu(outer, "w")
    assert (outer, inner, y, z, same) == ("x", "left/x", "left/y", "left/deep/z", "left/deep/z")
    assert list(builder.net.op[0].input) == ["left/x", "left/y_w", "left/y_b"]
    assert list(builder.net.op[1].input) == ["left/y"]
    assert list(builder.net.op[2].input) == list(builder.net.op[2].output) == ["left/deep/z"]
    assert w == "left/w"
    assert list(builder.net.op[3].input) == ["left/x"]
    assert builder.relu("x", "last") == "last"
    assert list(builder.net.op[4].input) == ["x"]
    with pytest.raises(SchemaError, match="a name scope needs a name"), builder.name_scope("/"):
        pass


def test_the_innermost_scope_that_knows_a_name_has_it_and_what_is_in_place_keeps_its_name() -> None:
    builder = ModelBuilder("m")
    builder.add_input("x", (1, 2))
    with builder.name_scope("outer"):
        builder.tanh("x", "y")
        with builder.name_scope("inner"):
            builder.tanh("x", "y")
            assert builder.relu("y", "z") == "outer/inner/z"
            assert list(builder.net.op[-1].input) == ["outer/inner/y"]
        assert builder.blob("y") == "outer/y"
        assert builder.relu("x", "x") == "x"
    assert builder.blob("unknown") == "unknown"


def test_operators_and_fillers_of_a_device_scope_run_on_its_device() -> None:
    builder = ModelBuilder("m")
    x = builder.add_input("x", (1, 2))
    with builder.device_scope("sim:1"):
        builder.fc(x, "y", 2, 2)
        with builder.device_scope(Device("cpu")):
            builder.relu("y", "z")
    builder.relu("y", "w")
    devices = [str(Device.from_option(operator.device_option)) for operator in builder.net.op]
    assert devices == ["sim:1", "cpu", "cpu"]
    assert {str(Device.from_option(operator.device_option)) for operator in builder.init_net.op} == {"sim:1"}
    assert builder.init_net.op[0].device_option.random_seed == builder.seed_of("y_w")
    builder.iteration()
    assert not builder.init_net.op[-1].HasField("device_option")
    with pytest.raises(DeviceError, match="'tpu:0' is unknown"), builder.device_scope("tpu:0"):
        pass


def test_arguments_of_a_scope_hold_for_calls_that_leave_them_out() -> None:
    builder = ModelBuilder("m")
    x = builder.add_input("x", (1, 2, 8, 8))
    with builder.arg_scope("conv", "max_pool", stride=2), builder.arg_scope("conv", pad=1, bias=False):
        builder.conv(x, "a", 2, 2, kernel=3)
        builder.conv(x, "b", 2, 2, kernel=3, stride=1)
        builder.max_pool(x, "p", 2)
    builder.conv(x, "c", 2, 2, kernel=3)
    found = [
        (arguments_of(op, "").int("stride", 0), arguments_of(op, "").int("pad", 0), len(op.input))
        for op in builder.net.op
    ]
    assert found == [(2, 1, 2), (1, 1, 2), (2, 0, 1), (1, 0, 3)]
    with pytest.raises(SchemaError, match="unknown layer 'convolution'"), builder.arg_scope("convolution", pad=1):
        pass
    with pytest.raises(SchemaError, match=r"conv has no arguments \['padding'\]"), builder.arg_scope("conv", padding=1):
        pass


def test_sharing_goes_from_the_innermost_block_outwards_and_by_the_longest_name() -> None:
    builder = ModelBuilder("m")
    x = builder.add_input("x", (4, 3))

    def parameters_in(scope: str) -> list[str]:
        with builder.name_scope(scope):
            builder.fc(x, "fc", 3, 2)
        return list(builder.net.op[-1].input[1:])

    assert parameters_in("a") == ["a/fc_w", "a/fc_b"]
    with builder.parameter_sharing({"b": "a", "d": "a"}):
        assert parameters_in("b") == ["a/fc_w", "a/fc_b"]
        with builder.parameter_sharing({"c": "b", "d": "e"}):
            assert parameters_in("c") == ["a/fc_w", "a/fc_b"]
            assert parameters_in("d") == ["e/fc_w", "e/fc_b"]
    with builder.parameter_sharing({"f": "a", "f/fc_b": "e/fc_b"}):
        assert parameters_in("f") == ["a/fc_w", "e/fc_b"]
    with builder.parameter_sharing({"g": "h", "h": "a"}):
        assert parameters_in("g") == ["a/fc_w", "a/fc_b"]
        assert parameters_in("great") == ["great/fc_w", "great/fc_b"]
    circle = "i/fc_w -> j/fc_w -> i/fc_w is a cycle"
    with builder.parameter_sharing({"i": "j", "j": "i"}), pytest.raises(SchemaError, match=circle):
        parameters_in("i")
    with builder.parameter_sharing({"k": "k", "l": "l/inner"}):
        assert parameters_in("k") == ["k/fc_w", "k/fc_b"]
        assert parameters_in("l") == ["l/inner/fc_w", "l/inner/fc_b"]


def test_parameters_have_tags() -> None:
    builder = ModelBuilder("m")
    x = builder.add_input("x", (1, 3, 4, 4))
    builder.spatial_bn(builder.conv(x, "conv", 3, 4, kernel=1), "bn", 4)
    own = builder.add_parameter("own", [2], gaussian(1), tags=("mine", "weight"))
    assert builder.weights == ["conv_w", own]
    assert builder.biases == ["conv_b"]
    assert builder.tagged("mine") == [own]
    assert builder.tags_of("bn_s") == frozenset()
    with pytest.raises(SchemaError, match="parameter 'nothing' does not exist"):
        builder.tags_of("nothing")
