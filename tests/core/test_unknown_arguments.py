"""Arguments that no operator of the type knows are refused, with a suggestion; harmless ones and those of forward
operators on gradient operators are not."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.arguments import make_argument
from dagexec.core.common_arguments import READ_BY_NETS, UNREAD
from dagexec.core.registry import registered_operators, schema_of, verify
from dagexec.errors import ArgumentError


def definition(op_type: str, inputs: int, **arguments: int | float | str) -> OperatorDef:
    made = OperatorDef(type=op_type, input=[f"x{index}" for index in range(inputs)], output=["y"])
    made.arg.extend(make_argument(name, value) for name, value in arguments.items())
    return made


def test_a_misspelled_argument_is_refused_before_the_net_is_built_and_the_name_is_suggested() -> None:
    workspace = Workspace()
    workspace.feed_blob("x0", np.ones((1, 1, 4, 4), np.float32))
    net = NetDef(name="shrinking", op=[definition("MaxPool", 1, kernel=2, strides_=2)])
    expected = (
        "MaxPool 'y' (operator 0) of net 'shrinking': MaxPool does not know the argument 'strides_'; "
        "did you mean 'strides'?"
    )
    with pytest.raises(ArgumentError, match=re.escape(expected)):
        workspace.create_net(net)


def test_where_no_name_is_close_the_message_has_those_the_operator_knows() -> None:
    with pytest.raises(ArgumentError, match="does not know the argument 'zebra'; it has scale"):
        verify(definition("Scale", 1, zebra=1))


def test_an_operator_without_arguments_says_so() -> None:
    with pytest.raises(ArgumentError, match="Relu does not know the argument 'alpha'; it has no arguments"):
        verify(definition("Relu", 1, alpha=0.1))


@pytest.mark.parametrize("name", sorted(UNREAD | READ_BY_NETS.keys()))
def test_every_operator_may_have_what_exporters_and_passes_add(name: str) -> None:
    verify(definition("Relu", 1, **{name: 1}))


def test_an_operator_may_have_what_caffe2s_own_nets_give_it_though_nothing_reads_it() -> None:
    verify(definition("PRelu", 2, alpha=0.25))
    assert "argument alpha: not read" in schema_of("PRelu").help()


def test_a_gradient_operator_may_have_the_arguments_of_the_operator_it_is_of() -> None:
    gradient = definition("ReluGradient", 2, ratio=0.5)
    with pytest.raises(ArgumentError, match="ratio"):
        verify(gradient)
    gradient.is_gradient_op = True
    verify(gradient)
    gradient.arg.append(make_argument("no_operator_has_this", 1))
    with pytest.raises(ArgumentError, match="no_operator_has_this"):
        verify(gradient)


def test_parts_of_a_composite_learning_rate_have_its_arguments_under_their_prefix() -> None:
    known = schema_of("LearningRate").knows_argument
    assert known("sub_policy_0_gamma")
    assert known("sub_policy_12_sub_policy_3_stepsize")
    assert not known("sub_policy_0_gama")
    assert not known("sub_policy_x_gamma")


def test_every_argument_an_operator_requires_is_one_that_it_knows() -> None:
    for name in registered_operators():
        schema = schema_of(name)
        assert all(schema.knows_argument(argument) for argument in schema.required_args), name
