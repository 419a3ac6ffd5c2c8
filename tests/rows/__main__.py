"""`python -m tests.rows`: rows of batches against lone runs, under several instruction sets.

Each instruction set and engine is a process of its own. Operators run as they are, by the engine that is asked for,
and networks as `dagexec.compile` makes them. A case that differs is a line with how many rows of which batches do, and
by how much; the exit status is 1 if there is one.

With `--results FILE` each network is a process of its own, for `--limit` seconds at most, and what it tries is kept in
the file: another call goes on where one was stopped, and then counts what is in it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ["DAGEXEC_CHOICES"] = "off"  # before anything of dagexec looks: what was measured elsewhere decides nothing
os.environ["DAGEXEC_TUNING_SECONDS"] = "0"

from dagexec.core.registry import has_engine
from dagexec.errors import DagexecError
from tests.rows.case import Subject
from tests.rows.comparison import compared, differences
from tests.rows.networks import DISTINCT, NETWORKS, network
from tests.rows.operators import operator_cases
from tests.rows.record import Record, Setting

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
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), default="float32", help="of networks")
    parser.add_argument("--tuning", type=float, default=0, metavar="SECONDS", help="of networks; 0: none")
    parser.add_argument("--results", type=Path, metavar="FILE", help="networks only: go on with what it lacks")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="of a network, with --results")
    parser.add_argument("--through", default="", metavar="COMMAND", help="starts each network, such as 'nice -n 19'")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        return int(_compare(options) if options.results is None else _add_results(options))
    wanted = itertools.product(
        [options.isa] if options.isa else ENVIRONMENTS, [options.engine] if options.engine else ENGINES
    )
    failed = 0
    for isa, engine in wanted:
        print(f"--- {isa}, {engine}", flush=True)
        if options.results is None:
            failed |= _run_here(isa, engine, [])
        else:
            failed |= _go_on(options, isa, engine)
    return failed


def _run_here(isa: str, engine: str, more: Sequence[str], through: str = "", limit: float | None = None) -> int:
    """Run this command for an instruction set and engine. Returns its exit status, or 1 where time ran out."""
    command = [*shlex.split(through), sys.executable, "-m", "tests.rows", *sys.argv[1:]]
    command += ["--here", "--isa", isa, "--engine", engine, *more]
    without = {"DAGEXEC_ONEDNN": "off", "DAGEXEC_OWN_KERNELS": "off"} if engine == "numpy" else {}
    environment = {**os.environ, **ENVIRONMENTS[isa], **without}
    try:
        return subprocess.run(command, env=environment, check=False, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return 1


def _go_on(options: argparse.Namespace, isa: str, engine: str) -> bool:
    """Try what the results lack, and print what differs. Returns whether anything does, or is lacking."""
    names = [name for name in NETWORKS if options.only in name]
    for name in names:
        if _lacking(options, isa, engine, name):
            _run_here(isa, engine, ["--only", name], options.through, options.limit)
    known = Record(options.results).read()
    lacking = [one for name in names for one in _lacking(options, isa, engine, name)]
    tried = [one for name in names for one in _settings(options, isa, engine, name) if one in known]
    found = [one for one in tried if known[one]]
    for one in found:
        print(f"{one.network}, threads {one.threads}: {'; '.join(known[one])}")
    print(f"{len(found)} of {len(tried)} differ, {len(lacking)} are not tried", flush=True)
    return bool(found or lacking)


def _settings(options: argparse.Namespace, isa: str, engine: str, name: str) -> list[Setting]:
    how = f"{options.dtype}, tuning {options.tuning:g}"
    pairs = itertools.product(options.threads, options.batches)
    return [Setting(isa, engine, name, how, threads, size) for threads, size in pairs]


def _lacking(options: argparse.Namespace, isa: str, engine: str, name: str) -> list[Setting]:
    known = Record(options.results).read()
    return [one for one in _settings(options, isa, engine, name) if one not in known]


def _add_results(options: argparse.Namespace) -> bool:
    """Try what the results lack of the network that is exactly `--only`, a batch after the other."""
    lacking = _lacking(options, options.isa, options.engine, options.only)
    record, subject = Record(options.results), network(options.only)
    for threads, settings in itertools.groupby(lacking, lambda one: one.threads):
        of_size = {one.size: one for one in settings}
        more = {**_of_networks(options, subject), "intra_op_threads": threads}
        try:
            for size, found in compared(subject, list(of_size), distinct=DISTINCT, **more):
                record.add(of_size.pop(size), map(str, found))
        except DagexecError as error:
            record.add(next(iter(of_size.values())), [f"{type(error).__name__}: {error}"])
    return False


def _of_networks(options: argparse.Namespace, subject: Subject) -> dict[str, object]:
    """Options of `dagexec.compile`."""
    samples = [subject.feeds([number]) for number in range(DISTINCT)] if options.dtype == "int8" else None
    return {"dtype": options.dtype, "calibration": samples, "tuning_seconds": options.tuning}


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
                subject = network(name)
                yield name, subject, DISTINCT, _of_networks(options, subject)


if __name__ == "__main__":
    sys.exit(main())
