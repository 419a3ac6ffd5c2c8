"""Dropout in inference."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.errors import ArgumentError, SchemaError, UnsupportedOperatorError
from dagexec.scheduler.simple import SimpleNet
from tests.ops.running import operator_def, run_operator


def test_output_equals_the_input_and_the_mask_is_all_true() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    y, mask = run_operator("Dropout", [x], 2, is_test=1, ratio=0.25)
    np.testing.assert_array_equal(y, x)
    assert mask.dtype == np.bool_
    assert mask.shape == x.shape
    assert mask.all()


def test_output_has_its_own_values_when_its_input_is_overwritten_later() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.array([-1.0, 2.0], np.float32))
    ops = [operator_def("Dropout", ["x"], ["y"], is_test=1), operator_def("Relu", ["x"], ["x"])]
    with SimpleNet(NetDef(name="n", op=ops, external_output=["x", "y"]), workspace) as net:
        net.run()
    assert workspace.fetch_blob("y").tolist() == [-1, 2]
    assert workspace.fetch_blob("x").tolist() == [0, 2]


def test_dropout_in_place_changes_nothing() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.array([-1.0, 2.0], np.float32))
    with SimpleNet(NetDef(name="n", op=[operator_def("Dropout", ["x"], ["x"], is_test=1)]), workspace) as net:
        net.run()
    assert workspace.fetch_blob("x").tolist() == [-1, 2]


def test_dropout_refuses_training_a_missing_mode_and_a_bad_ratio() -> None:
    x = np.ones(2, np.float32)
    with pytest.raises(UnsupportedOperatorError, match=r"training mode \(is_test=0\) is not implemented yet"):
        run_operator("Dropout", [x], is_test=0)
    with pytest.raises(SchemaError, match="argument 'is_test' is required"):
        run_operator("Dropout", [x])
    with pytest.raises(ArgumentError, match=r"'ratio' must be in \[0, 1\), found 1"):
        run_operator("Dropout", [x], is_test=1, ratio=1.0)
