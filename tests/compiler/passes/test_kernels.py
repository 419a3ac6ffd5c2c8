"""No operator that a compiled net executes is one of oneDNN's reference loops, whatever instructions it may use.

Each net is compiled in a process of its own. What ran is what the library says in its verbose output, which knows
nothing of the rule.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dagexec.compiler.passes import kernels
from dagexec.compiler.passes.kernels import has_kernel
from dagexec.core.dtypes import FLOAT32
from dagexec.core.node import new_node
from dagexec.core.schema import TensorType
from dagexec.ops.base.layout import BLOCKS
from dagexec.ops.engines.onednn.availability import widest_blocks
from dagexec.ops.engines.onednn.binding import library

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")

RUN = """
import sys
import numpy as np
import dagexec
from dagexec import zoo
from dagexec.compiler.passes.layout import LAYOUTS, layouts

print("layouts", *layouts(), sep="|")
model = zoo.build(sys.argv[1], batch_size=1)
image = np.ones(model.inputs["data"].shape, np.float32)
for layout in LAYOUTS if sys.argv[2] == "all" else layouts():
    if layout != "NCHW":
        with dagexec.compile(model, layout=layout, net_type="simple", tuning_seconds=0) as executor:
            executor.run({"data": image})
"""


def output_of(model: str, isa: str, which: str) -> tuple[list[str], list[list[str]], str]:
    """The layouts that are tried, the primitives that ran (kind, implementation, ...), and what was logged."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "ONEDNN_VERBOSE": "1", "DAGEXEC_CHOICES": "off"}
    command = [sys.executable, "-c", RUN, model, which]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    (layouts,) = (line.split("|")[1:] for line in lines if line.startswith("layouts"))
    executed = [line.split(",")[3:] for line in lines if line.startswith("onednn_verbose,exec,cpu")]
    assert executed
    return layouts, executed, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["SSE41", "AVX2", "DEFAULT"])
@pytest.mark.parametrize("model", ["squeezenet", "mobilenet_v2"])
def test_no_net_executes_a_reference_implementation(model: str, isa: str) -> None:
    _, executed, _ = output_of(model, isa, "tried")
    assert not [line for line in executed if line[1].startswith("ref")]


@pytest.mark.slow
def test_blocks_without_kernels_are_asked_for_and_nhwc_serves() -> None:
    layouts, executed, log = output_of("lenet", "AVX2", "all")
    assert layouts == ["NHWC", "NCHW8c", "NCHW8c padded", "NCHW"]
    assert not [line for line in executed if line[1].startswith("ref")]
    assert "layout NCHW16c: oneDNN has no code for it here, NHWC is taken; layouts here: NHWC, NCHW8c" in log


def convolution(name: str, order: str, group: int, width: int) -> bool:
    """The answer for a 3x3 convolution of `group` groups of `width` channels."""
    definition = new_node(
        "Conv", ["x" + name, "w"], ["y"], engine="ONEDNN", name=name, kernel=3, group=group, order=order
    )
    block = BLOCKS[order]
    image = TensorType((1, group * width // block, 9, 9, block), FLOAT32)
    return has_kernel(definition, [(image, False), (TensorType((group * width, width, 3, 3), FLOAT32), True)])


def test_a_geometry_is_asked_for_once_whatever_its_blobs_are_called() -> None:
    order = widest_blocks()
    assert order is not None
    kernels._has_kernel.cache_clear()
    assert convolution("one", order, 2, BLOCKS[order])
    assert convolution("other", order, 2, BLOCKS[order])
    assert kernels._has_kernel.cache_info().misses == 1
    assert not convolution("three quarters", order, 4, 3 * BLOCKS[order] // 4)
    assert kernels._has_kernel.cache_info().misses == 2
