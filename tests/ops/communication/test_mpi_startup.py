"""A rank that does not start is named, and holds nobody up for ever."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dagexec.ops.families.communication.mpi_startup import limited_start
from tests import mpi

SCRIPT = """
import os, signal
from dagexec.ops.families.communication import mpi_startup
mpi_startup.MAX_START = 2.0
from dagexec.ops.families.communication.mpi import join_mpi, require_mpi
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    if {late}:
        require_mpi()
    os.kill(os.getpid(), signal.SIGSTOP)
join_mpi("world", -1, -1, timeout=1.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_is_stopped_while_mpi_starts_is_named_and_the_others_end(late: bool, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT.format(late=late))
    status, _, err = mpi.run(2, script, timeout=60)
    assert status
    assert "rank 0: MPI has not started within 2 s: rank 1 is stopped; this rank is ended" in err


def test_without_mpiexec_nobody_is_waited_for_and_nothing_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "Popen", lambda *_arguments, **_options: pytest.fail("a process was started"))
    with limited_start(0.0):
        pass
