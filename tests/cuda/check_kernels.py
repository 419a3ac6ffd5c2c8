"""`python -m tests.cuda.check_kernels`: every kernel that the operator tests compile, compiled by the real NVRTC.

The operator tests run with every operator on CUDA, emulated where there is no GPU; then NVRTC compiles each source that
was seen, for each architecture it offers of those we care about. Needs CuPy and NVRTC, but no device. Arguments are
paths of tests, by default all of tests/ops and tests/cuda; `--every N` runs one operator call in N.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from dagexec.platform.extras import install_command
from tests.cuda.nvrtc import architectures, errors_of, nvrtc


def main() -> int:
    """0 when all compile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", default=["tests/ops", "tests/cuda"])
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    if nvrtc() is None:
        print(f"NVRTC is not installed; install it with: {install_command('cuda12')}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder, "sources")
        environment = {
            **os.environ,
            "DAGEXEC_KERNEL_SOURCES": str(sources),
            "DAGEXEC_ON_CUDA_EVERY": str(given.every),
            "DAGEXEC_ON_DEVICE_EVERY": "1000000",
        }
        command = [sys.executable, "-m", "pytest", "-q", *given.tests]
        status = subprocess.run(command, env=environment, check=False).returncode
        found = sorted(sources.glob("*.cu"))
        errors = errors_of(found)
        print(f"{len(found)} kernels for sm_{', sm_'.join(map(str, architectures()))}: {len(errors)} do not compile")
        for error in errors[:10]:
            print(error)
        return int(bool(errors or status or not found))


if __name__ == "__main__":
    sys.exit(main())
