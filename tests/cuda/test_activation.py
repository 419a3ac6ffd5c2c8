"""Activations on CUDA."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.core.device import Device
from tests.cuda.emulated import cuda_devices
from tests.ops.running import on_device, operator_def


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_relu_keeps_nan(dtype: type) -> None:
    x = np.array([[-1, 2.5, np.nan], [0, -0.0, 3]], dtype)
    with cuda_devices():
        (y,) = on_device(Device("cuda", 0), operator_def("Relu", ["x"], ["y"]), {"x": x})
    np.testing.assert_array_equal(y, np.maximum(x, 0))
