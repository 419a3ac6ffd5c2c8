"""Chosen tests under each instruction set that this processor has, and without oneDNN: `make test-matrix`.

A row is a process of pytest with `ONEDNN_MAX_CPU_ISA` and `OPENBLAS_CORETYPE` set, which make a small processor of a
large one. `--seconds` bounds the whole: rows begin while there is time, the first one by turns, and what was left out
is said at the end. The status is 1 when a row fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from tests.selection import ROOT, part_of_commit

CHOSEN = (
    "tests/compiler/test_compiled_nets.py",
    "tests/ops/test_all_engines.py",
    "tests/ops/elementwise/test_formulas.py::test_onednn_computes_the_formula",
    "tests/ops/onednn/test_keeping_nan.py",
    "tests/ops/onednn/test_choice.py",
    "tests/ops/onednn/test_conv.py",
    "tests/ops/onednn/test_elementwise.py",
    "tests/ops/onednn/test_elementwise_gradient.py",
    "tests/ops/onednn/test_measured_product.py",
    "tests/ops/onednn/test_pooling.py",
    "tests/ops/quantized/test_quantized_products.py",
    "tests/ops/onednn/test_quantized.py",
    "tests/ops/onednn/test_widened.py",
    "tests/ops/onednn/test_winograd.py",
    "tests/ops/test_threads_and_bytes.py",
    "tests/rows/test_bytes.py",
    "tests/compiler/passes/test_layout.py",
    "tests/compiler/passes/test_layout_of_channels.py",
    "tests/compiler/passes/test_layout_of_operators.py",
    "tests/compiler/passes/test_bfloat16.py",
    "tests/compiler/tuning/test_choosing.py",
    "tests/compiler/tuning/test_rules.py",
    "tests/zoo/test_zoo.py",
)
"""Operators, passes, tuning and networks whose code or results depend on instructions."""


@dataclass(frozen=True)
class Row:
    """One instruction set.

    Attributes:
        isa: as ONEDNN_MAX_CPU_ISA takes it; "own": our own kernels without oneDNN; "off": NumPy alone; "arm": some of
            `tests.arm`, on an emulated 64-bit Arm.
        core: for OPENBLAS_CORETYPE; "": what OpenBLAS finds.
    """

    isa: str
    core: str

    def environment(self) -> dict[str, str]:
        """The variables of the row's process."""
        limits = WITHOUT.get(self.isa) or {"ONEDNN_MAX_CPU_ISA": self.isa}
        return {**os.environ, **limits, "OPENBLAS_CORETYPE": self.core, "DAGEXEC_MATRIX_ROW": self.isa}


WITHOUT = {
    "own": {"DAGEXEC_ONEDNN": "off"},
    "off": {"DAGEXEC_ONEDNN": "off", "DAGEXEC_OWN_KERNELS": "off"},
}

ROWS = (
    Row("SSE41", "Nehalem"),
    Row("AVX2", "Haswell"),
    Row("AVX512_CORE", "SkylakeX"),
    Row("AVX512_CORE_BF16", "SkylakeX"),
    Row("AVX512_CORE_AMX", "SkylakeX"),
    Row("own", ""),
    Row("off", ""),
    Row("arm", ""),
)

_EFFECTIVE = """
from dagexec.ops.engines.onednn.binding import engine_library
found = engine_library()
print("off" if found is None else found.isa.name if found.has_primitives else "own")
"""


def is_offered(row: Row) -> bool:
    """True when code is generated for exactly this instruction set, or by nobody but us, when that is asked for."""
    if row.isa == "arm":
        done = subprocess.run(["make", "--silent", ".arm/.installed"], cwd=ROOT, check=False)
        return done.returncode == 0
    done = subprocess.run(
        [sys.executable, "-c", _EFFECTIVE], env=row.environment(), cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip() == row.isa


def run(row: Row) -> bool:
    """Run the chosen tests. Returns whether all passed."""
    if row.isa == "arm":
        command = [sys.executable, "-m", "tests.arm", "--seconds", "1"]  # one of its files, by turns
        return subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    part = os.environ.get("DAGEXEC_PART", "commit")
    workers = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"]
    command = [sys.executable, "-m", "pytest", *workers, f"--part={part}", *CHOSEN]
    done = subprocess.run(command, env=row.environment(), cwd=ROOT, check=False)
    return done.returncode == 0


def main() -> int:
    """Run the rows that there is time for. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Chosen tests under each instruction set.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row that may end later")
    deadline = time.monotonic() + parser.parse_args().seconds
    turn = part_of_commit() % len(ROWS)
    found: dict[str, str] = {}
    longest = 0.0
    for row in (*ROWS[turn:], *ROWS[:turn]):
        begun = time.monotonic()
        if begun + longest > deadline:
            found[row.isa] = "left out for want of time: make test-matrix runs it"
            continue
        if not is_offered(row):
            found[row.isa] = "left out: it cannot be had here"
            continue
        print(f"--- {row.isa} {row.core}", flush=True)
        found[row.isa] = "passed" if run(row) else "FAILED"
        longest = max(longest, time.monotonic() - begun)
        found[row.isa] += f" in {time.monotonic() - begun:.0f} s"
    print("\nmatrix of instruction sets")
    for row in ROWS:
        print(f"  {row.isa:18}{found[row.isa]}")
    return int(any(text.startswith("FAILED") for text in found.values()))


if __name__ == "__main__":
    sys.exit(main())
