"""A limit to how long the ranks of MPI wait for each other when they start.

MPI's own start has none, and keeps the interpreter to itself: no thread of Python could end it. So a small process
watches, and ends its rank, with a message that says which ranks of this machine are stopped or missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_START = 120.0
"""Seconds that a rank waits for the others to start, or as long as it waits for them later, if that is more."""

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_JOBS = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_STEP_ID")


@contextmanager
def limited_start(timeout: float) -> Iterator[None]:
    """Within it, this process is ended where it takes longer than `MAX_START` and `timeout` seconds."""
    if not _first(os.environ, _RANKS):
        yield  # nobody to wait for
        return
    command = [
        sys.executable,
        "-I",
        "-S",
        os.path.realpath(__file__),
        str(os.getpid()),
        str(max(timeout, MAX_START)),
    ]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        assert watch.stdin is not None
        watch.stdin.close()
        watch.wait()


def _first(environment: os._Environ[str] | dict[str, str], names: tuple[str, ...]) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")


def _watch(process: int, seconds: float) -> None:
    """Wait until the pipe is closed; after `seconds`, say what is wrong and end `process`."""
    import select
    import signal

    if select.select([sys.stdin], [], [], seconds)[0]:
        return
    rank = _first(os.environ, _RANKS)
    print(
        f"dagexec: rank {rank}: MPI has not started within {seconds:g} s: {_blamed()}; this rank is ended",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    os.kill(process, signal.SIGKILL)


def _blamed() -> str:
    """Which ranks of the job do not go on, as far as this machine's processes tell."""
    states = dict(_ranks_here())
    stopped = sorted(rank for rank, state in states.items() if state in "TtZX")
    size = _first(os.environ, _SIZES)
    missing = [rank for rank in range(int(size) if size.isdigit() else 0) if rank not in states]
    found = [f"rank {rank} is stopped" for rank in stopped]
    found += [f"rank {rank} does not run on this machine" for rank in missing]
    return ", ".join(found) or "all ranks run on this machine, and none is stopped"


def _ranks_here() -> Iterator[tuple[int, str]]:
    """Ranks of the same job, and the states of their processes."""
    job = _first(os.environ, _JOBS)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            content = (folder / "environ").read_bytes().decode(errors="replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        environment = dict(line.split("=", 1) for line in content.split("\0") if "=" in line)
        rank = _first(environment, _RANKS)
        watches = os.path.basename(__file__).encode() in command
        if rank.isdigit() and _first(environment, _JOBS) == job and not watches:
            yield int(rank), state


if __name__ == "__main__":
    _watch(int(sys.argv[1]), float(sys.argv[2]))
