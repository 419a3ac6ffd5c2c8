"""`python -m tests.rows`: rows of batches against lone runs, under several instruction sets.

Each instruction set and engine is a process of its own. Operators run as they are, by the engine that is asked for,
and networks as `dagexec.compile` makes them. A case that differs is a line with how many rows of which batches do, and
by how much; the exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

os.environ["DAGEXEC_CHOICES"] = "off"  # before anything of dagexec looks: what was measured elsewhere decides nothing
os.environ["DAGEXEC_TUNING_SECONDS"] = "0"

from dagexec.core.registry import has_engine
from dagexec.errors import DagexecError
from tests.rows.case import Subject
from tests.rows.comparison import differences
from tests.rows.networks import DISTINCT, NETWORKS, network
from tests.rows.operators import operator_cases

SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 23, 31, 32, 33, 48, 63, 64)
AVX512 = "AVX512_SKX AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_KNL AVX512_KNM AVX512_CLX AVX512_CNL"
ENVIRONMENTS = {
    "full": {},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell", "NPY_DISABLE_CPU_FEATURES": AVX512},
}
ENGINES = {"onednn": "ONEDNN", "numpy": ""}


def main() -> int:
    """Exit status 1 if rows differ, or a model cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m tests.rows", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="cases and networks with this in their names")
    parser.add_argument("--what", choices=("operators", "networks"))
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--isa", choices=ENVIRONMENTS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=SIZES, metavar="N", help="sizes, of up to 64")
    parser.add_argument("--all", action="store_true", help="name those that do not differ, too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        return int(_compare(options))
    wanted = itertools.product(
        [options.isa] if options.isa else ENVIRONMENTS, [options.engine] if options.engine else ENGINES
    )
    failed = 0
    for isa, engine in wanted:
        print(f"--- {isa}, {engine}", flush=True)
        command = [sys.executable, "-m", "tests.rows", *sys.argv[1:], "--here", "--isa", isa, "--engine", engine]
        limits = {"DAGEXEC_ONEDNN": "off"} if engine == "numpy" else {}
        failed |= subprocess.run(command, env={**os.environ, **ENVIRONMENTS[isa], **limits}, check=False).returncode
    return failed


def _compare(options: argparse.Namespace) -> bool:
    """Print what differs. Returns whether anything does."""
    found = tried = 0
    for name, subject, distinct, more in _subjects(options):
        for threads in options.threads:
            tried += 1
            lines = _lines(subject, options.batches, distinct, {**more, "intra_op_threads": threads})
            found += bool(lines)
            if lines or options.all:
                print(f"{name}, threads {threads}: {'; '.join(lines) or 'the same'}", flush=True)
    print(f"{found} of {tried} differ", flush=True)
    return found > 0


def _lines(subject: Subject, sizes: Sequence[int], distinct: int, more: dict[str, object]) -> list[str]:
    try:
        return list(map(str, differences(subject, sizes, distinct=distinct, **more)))
    except DagexecError as error:
        return [f"{type(error).__name__}: {error}"]


def _subjects(options: argparse.Namespace) -> Iterator[tuple[str, Subject, int, dict[str, object]]]:
    engine = ENGINES[options.engine]
    if options.what != "networks":
        for case in operator_cases():
            if options.only in str(case) and (not engine or has_engine(case.op_type, engine)):
                yield str(case), case.subject(engine), max(options.batches), {"optimize": False, "net_type": "simple"}
    if options.what != "operators":
        for name in NETWORKS:
            if options.only in name:
                yield name, network(name), DISTINCT, {}


if __name__ == "__main__":
    sys.exit(main())
