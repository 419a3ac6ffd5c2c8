"""Compiled networks of the zoo against float64, in every layout that this processor's kernels make sense in.

`make test-matrix` runs it once for each instruction set, see docs/testing.md.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import dagexec
from dagexec import zoo
from dagexec.binding.parameters import initialized
from dagexec.compiler.passes.layout import LAYOUTS, layouts
from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import InputInfo, Model
from dagexec.ops.engines.onednn.binding import engine_library
from tests.compiler.passes.models import Array, feeds_for, outputs_of

SIZES = {"lenet": 28, "resnet20": 32, "squeezenet": 75, "mobilenet_v2": 64, "densenet121": 64, "googlenet": 75}
"""Networks, and sides of images that are large enough for them."""

LARGER = {"inception_v3": 80, "nasnet_a": 64}
"""Likewise, those that only some tests compute."""

ROW = "DAGEXEC_MATRIX_ROW"  # the matrix sets it
IN_PARTS = [] if ROW in os.environ else [pytest.mark.slow]
NETWORKS = [name if name == "lenet" else pytest.param(name, marks=IN_PARTS) for name in SIZES]
"""A row of the matrix computes all of them; elsewhere those behind the first run in parts."""

LARGEST_ERROR = 2e-5
"""Of the largest element of a softmax: it multiplies the rounding of what goes into it, a few 1e-7, by its size."""


@cache
def built(name: str) -> Model:
    """A network of the zoo for two small images."""
    model = initialized(zoo.build(name))
    (given,) = model.inputs.items()
    shape = (2, (given[1].shape or ())[1], *[(SIZES | LARGER)[name]] * 2)
    return replace(model, inputs={given[0]: InputInfo(FLOAT32, shape)})


@cache
def exact(name: str) -> dict[str, Array]:
    """The network's outputs in float64, by NumPy's operators on the net as it is given."""
    model = built(name)
    wide = {blob: array.astype(np.float64) if array.dtype == np.float32 else array
            for blob, array in model.parameters.items()}  # fmt: skip
    feeds = {blob: array.astype(np.float64) for blob, array in feeds_for(model).items()}
    found = outputs_of(replace(model, parameters=wide), feeds, runs=1)
    assert all(array.dtype == np.float64 for array in found.values())
    return found


@pytest.mark.skipif(ROW not in os.environ, reason="is for `make test-matrix`")
def test_the_library_generates_code_for_the_rows_instruction_set() -> None:
    wanted, found = os.environ[ROW], engine_library()
    assert (found is None) == (wanted == "off")
    assert (found is not None and not found.has_primitives) == (wanted == "own")
    assert found is None or not found.has_primitives or found.isa.name == wanted


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_compiled_network_computes_what_float64_does(name: str, layout: str, threads: int) -> None:
    if layout not in (*layouts(), "NCHW"):
        pytest.skip(f"{layout} has no kernels here")
    model = built(name)
    with dagexec.compile(model, layout=layout, intra_op_threads=threads) as executor:
        found = executor.run(feeds_for(model))
        again = executor.run(feeds_for(model))
    for blob, wanted in exact(name).items():
        assert again[blob].tobytes() == found[blob].tobytes()
        error = np.abs(found[blob] - wanted).max() / np.abs(wanted).max()
        assert error < LARGEST_ERROR, blob
