"""What is known of a model's results before it runs: `Executor.output_info`."""

from __future__ import annotations

import numpy as np
import pytest

import dagexec
from dagexec import NetDef
from dagexec.core import dtypes
from dagexec.core.model import InputInfo, Model
from tests.held import doubled_model
from tests.ops.running import operator_def


@pytest.mark.parametrize("optimize", [True, False])
def test_sizes_that_follow_from_free_ones_are_free(optimize: bool) -> None:
    with dagexec.compile(doubled_model(), optimize=optimize) as executor:
        assert executor.output_info() == {"y": InputInfo(dtypes.FLOAT32, (None, 3))}


def test_sizes_that_every_run_has_are_known() -> None:
    with dagexec.compile("zoo:lenet") as executor:
        [name], info = executor.outputs, executor.output_info()
        assert {axis for axis in info[name].shape or () if axis is not None} == {10}
        assert info[name].dtype is dtypes.FLOAT32


def test_sizes_that_only_a_run_can_tell_are_unknown() -> None:
    net = NetDef(name="found", op=[operator_def("NonZero", ["x"], ["y"])], external_input=["x"])
    model = Model(name="found", net=net, inputs={"x": InputInfo(dtypes.FLOAT32, (3,))}, outputs=("y",))
    with dagexec.compile(model) as executor:
        info = executor.output_info()["y"]
        result = executor.run({"x": np.float32([0, 1, 2])})["y"]
        assert info.dtype in (None, dtypes.from_numpy(result.dtype))
        assert info.shape is None or info.shape[-1] is None
