from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from dagexec.ops.onednn.binding import library

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


@pytest.mark.slow
def test_the_setting_of_idle_threads_is_seen_by_the_library_alone() -> None:
    assert _output("product(); print(os.environ.get('GOMP_SPINCOUNT'))") == "None"
    assert _output("product(); print(os.environ.get('GOMP_SPINCOUNT'))", GOMP_SPINCOUNT="7") == "7"


@pytest.mark.slow
@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside scikit-learn's"])
def test_the_librarys_threads_spin_for_40_us_whichever_copies_of_libgomp_are_there(other: bool) -> None:
    found = [os.fspath(path) for path in Path(sysconfig.get_path("purelib")).glob("scikit_learn.libs/libgomp*")]
    if other and not found:
        pytest.skip("needs the package scikit-learn")
    loading = f"import ctypes; ctypes.CDLL({found[0]!r})" if other else ""
    script = f"import os; os.dup2(1, 2)\n{loading}\nproduct()"
    settings = _output(script, OMP_DISPLAY_ENV="VERBOSE")
    if "GOMP_SPINCOUNT" not in settings:
        pytest.skip("oneDNN uses another OpenMP runtime here")
    spins = [line.partition("'")[2].rstrip("'") for line in settings.splitlines() if "GOMP_SPINCOUNT" in line]
    assert spins[-1] == "2000"


@pytest.mark.slow
def test_idle_threads_stop_spinning_soon() -> None:
    script = """
import time
product()
spent = 0.0
for _ in range(20):
    product()
    start = time.process_time()
    time.sleep(0.01)
    spent += time.process_time() - start
print(spent / 20 < 1.5e-3)
"""
    assert _output(script) == "True"
