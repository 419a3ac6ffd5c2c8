"""Starting programs under mpiexec, for the tests of what several processes do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def mpiexec() -> str:
    """The path of mpiexec: the one of the environment that runs the tests, or of the system. Skips without one."""
    pytest.importorskip("mpi4py")
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("no mpiexec")
    return found


def start(ranks: int, *arguments: object) -> subprocess.Popen[str]:
    """`python ARGUMENTS` on so many ranks of this machine."""
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [mpiexec(), "--oversubscribe", "-n", str(ranks), sys.executable, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )


def run(ranks: int, *arguments: object, timeout: float = 120) -> tuple[int, str, str]:
    """The exit status, standard output and standard error of `python ARGUMENTS` on so many ranks."""
    process = start(ranks, *arguments)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"{ranks} ranks did not end within {timeout} s\n{out}\n{err}")
    return process.returncode, out, err
