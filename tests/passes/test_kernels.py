"""No operator that a compiled net executes is one of oneDNN's reference loops, whatever instructions it may use.

Each net is compiled in a process of its own. What ran is what the library says in its verbose output, which knows
nothing of the rule.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dagexec.ops.onednn.binding import library

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")

RUN = """
import sys
import numpy as np
import dagexec
from dagexec import zoo
from dagexec.passes.layout import LAYOUTS, layouts

print("layouts", *layouts(), sep="|")
model = zoo.build(sys.argv[1])
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


@pytest.mark.parametrize("isa", ["SSE41", "AVX2", "DEFAULT"])
@pytest.mark.parametrize("model", ["squeezenet", "mobilenet_v2"])
def test_no_net_executes_a_reference_implementation(model: str, isa: str) -> None:
    _, executed, _ = output_of(model, isa, "tried")
    assert not [line for line in executed if line[1].startswith("ref")]


def test_blocks_without_kernels_are_asked_for_and_nhwc_serves() -> None:
    layouts, executed, log = output_of("lenet", "AVX2", "all")
    assert layouts == ["NHWC", "NCHW8c", "NCHW8c padded", "NCHW"]
    assert not [line for line in executed if line[1].startswith("ref")]
    assert "layout NCHW16c: oneDNN has no code for it here, NHWC is taken; layouts here: NHWC, NCHW8c" in log
