from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dagexec.ops.engines.onednn.binding import library

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")

_NET = """
import os
import numpy as np
from dagexec.core.arguments import make_argument
from dagexec.core.proto import OperatorDef
from dagexec.core.registry import create_operator
from dagexec.core.workspace import Workspace
import dagexec.ops

def product():
    workspace = Workspace()
    for name, shape in (("x", (64, 256)), ("w", (128, 256)), ("b", (128,))):
        workspace.feed_blob(name, np.ones(shape, np.float32))
    definition = OperatorDef(type="FC", input=["x", "w", "b"], output=["y"], engine="ONEDNN")
    definition.arg.append(make_argument("threads", 2))
    made = create_operator(definition, workspace)
    made.bind(made.infer())()
    return float(workspace.fetch_blob("y")[0, 0])
"""


def _output(script: str, **environment: str) -> str:
    """What a new process prints."""
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", _NET + script],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_made_by_fork_computes_although_the_parents_openmp_threads_are_not_there() -> None:
    script = """
product()
child = os.fork()
if child == 0:
    import signal
    signal.alarm(20)  # a child that waits for ever for a team of threads is killed
    os._exit(0 if product() == 257.0 else 1)
print(os.waitpid(child, 0)[1])
"""
    assert _output(script) == "0"
