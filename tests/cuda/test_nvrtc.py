"""Kernels under the real NVRTC, where CuPy and NVRTC are installed: a device is not needed.

All that the operator tests ever compile is checked by `python -m tests.cuda.check_kernels`; here are a few.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagexec.core.cuda.prelude import PRELUDE
from tests.cuda.nvrtc import architectures, compile_error, errors_of, nvrtc
from tests.ops.running import check_on_cuda, operator_def

pytestmark = pytest.mark.skipif(nvrtc() is None, reason="CuPy or NVRTC is not installed; make cuda-check installs them")

rng = np.random.default_rng(5)
IMAGES, ROWS = rng.normal(size=(2, 4, 6, 6)).astype(np.float32), rng.normal(size=(5, 7)).astype(np.float32)
EXAMPLES: dict[str, tuple[Any, ...]] = {
    "Relu": (ROWS,),
    "Sigmoid": (ROWS,),
    "Softmax": (ROWS,),
    "Transpose": (IMAGES,),
    "MaxPool": (IMAGES,),
    "Add": (ROWS, ROWS[0]),
}


def test_the_prelude_compiles_for_every_architecture_and_a_wrong_kernel_does_not() -> None:
    assert architectures()
    for architecture in architectures():
        assert compile_error(PRELUDE + 'extern "C" __global__ void k() {}', architecture) is None
        found = compile_error(PRELUDE + 'extern "C" __global__ void k() { no_such_function(); }', architecture)
        assert found is not None
        assert "no_such_function" in found


@pytest.mark.parametrize("operator_type", EXAMPLES)
def test_kernels_that_the_emulation_runs_compile_by_nvrtc(
    operator_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.ops.running import run_operator

    monkeypatch.setenv("DAGEXEC_KERNEL_SOURCES", str(tmp_path))
    inputs = EXAMPLES[operator_type]
    arguments: dict[str, Any] = {"kernel": 2, "stride": 2} if operator_type == "MaxPool" else {}
    outputs = run_operator(operator_type, list(inputs), **arguments)
    names = [f"x{number}" for number in range(len(inputs))]
    definition = operator_def(operator_type, names, ["y0"], **arguments)
    check_on_cuda(definition, dict(zip(names, inputs, strict=True)), outputs)
    sources = list(tmp_path.glob("*.cu"))
    assert sources
    assert not errors_of(sources)


def test_every_kernel_that_was_collected_compiles_by_nvrtc() -> None:
    folder = os.environ.get("DAGEXEC_KERNEL_SOURCES")
    if not folder:
        pytest.skip("no kernels are collected: python -m tests.cuda.check_kernels does that")
    assert not errors_of(sorted(Path(folder).glob("*.cu")))
