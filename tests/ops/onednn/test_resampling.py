"""oneDNN's resampling stores large results past the caches, which takes aligned memory; callers' memory is not."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from dagexec import NetDef
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.engines.onednn.resampling import ResizeNearest
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import operator_def, workspace_of

pytestmark = pytest.mark.skipif(library() is None, reason="needs oneDNN")

INTO_UNALIGNED = """
import sys
import numpy as np
import dagexec
from tests.ops.running import operator_def
from tests.compiler.passes.models import model_of

size = 2 * 32 * 160 * 160
room = np.zeros(size + 32, np.float32)
start = -(room.ctypes.data // 4) % 16 + int(sys.argv[1])
y = room[start : start + size].reshape(2, 32, 160, 160)
x = np.random.default_rng(1).standard_normal((2, 32, 80, 80), np.float32)
resize = operator_def("ResizeNearest", ["x"], ["y"], width_scale=2.0, height_scale=2.0)
resize.engine = "ONEDNN"
model = model_of([resize], inputs={"x": x.shape})
with dagexec.compile(model, optimize=False, net_type="simple", num_workers=1) as executor:
    for _ in range(3):
        executor.run({"x": x}, out={"y": y})
        assert y.tobytes() == x.repeat(2, 2).repeat(2, 3).tobytes()
        assert executor.run({"x": x})["y"].tobytes() == y.tobytes()
"""


@pytest.mark.slow
@pytest.mark.parametrize("offset", [1, 4])
def test_a_large_result_goes_to_memory_that_is_not_aligned(offset: int) -> None:
    """In a process of its own: it ended by SIGSEGV."""
    subprocess.run([sys.executable, "-c", INTO_UNALIGNED, str(offset)], check=True)


def test_the_callers_memory_is_not_offered_to_it() -> None:
    workspace = workspace_of({"x": np.zeros((1, 16, 4, 4), np.float32)})
    resize = operator_def("ResizeNearest", ["x"], ["y"], width_scale=2.0, height_scale=2.0, engine="ONEDNN")
    with SimpleNet(NetDef(name="test", op=[resize]), workspace) as net:
        net.run()
        [operator], [prepared] = net.operators, net.prepared().prepared
        assert isinstance(operator, ResizeNearest)
        assert list(prepared.input_rebinds) == [0]
        assert not prepared.output_rebinds
