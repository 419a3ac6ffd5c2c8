"""Chosen tests on 64-bit Arm, whatever this machine is: `make test-arm`.

Where this machine is none, an arm64 Python of Debian's packages is unpacked into `.arm`, with the wheels that dagexec
needs, and runs under qemu's emulation of a processor: everything takes some thirty times as long, so that nothing is
timed. On a machine that is one the tests run as they are. `--seconds` bounds the whole: files of tests begin while
there is time, the first by turns, and what was left out is said.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.selection import ROOT, part_of_commit

FOLDER = ROOT / ".arm"
SYSTEM, SITE, PROGRAM = FOLDER / "root", FOLDER / "site", FOLDER / "python"
IS_ARM = platform.machine() in ("aarch64", "arm64")

CHOSEN = (
    "tests/platform/assembly",
    "tests/ops/kernels",
    "tests/scheduler/run/test_machine.py",
    "tests/scheduler/conformance/test_conforming.py",
    "tests/compiler/test_compiled_nets.py",
    "tests/zoo/test_zoo.py",
    "tests/ops/test_threads_and_bytes.py",
    "tests/rows/test_bytes.py",
)
"""What depends on instructions and on the order of memory: assemblers, kernels, the scheduler in machine code, nets
against float64, and bytes under threads and batches."""

SAME = ("lenet", "mobilenet_v2", "resnet20")
"""Nets of layers, of depthwise convolutions, and of Winograd's algorithm."""

PACKAGES = ("python3", "libstdc++6", "libgomp1", "libgcc-s1")
WHEELS = ("numpy", "ml_dtypes", "networkx", "anyio", "protobuf", "onnx", "threadpoolctl", "typer", "rich", "cffi")
TEST_WHEELS = ("pytest", "hypothesis", "trio")


def install() -> None:
    """Unpack an arm64 Python and wheels; what is there is left."""
    state = FOLDER / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
    }
    apt = ["apt-get", "--quiet=2", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    _run(*apt, "update")
    _run(*apt, "--yes", "--download-only", "install", *PACKAGES)
    for package in sorted((state / "cache" / "archives").glob("*.deb")):
        _run("dpkg-deb", "--extract", package, SYSTEM)
    PROGRAM.write_text(f'#!/bin/sh\nexec qemu-aarch64 -L {SYSTEM} -0 "$0" {_interpreter()} "$@"\n')
    PROGRAM.chmod(0o755)
    version = _interpreter().name.removeprefix("python")
    kinds = [word for number in (17, 27, 28) for word in ("--platform", f"manylinux_2_{number}_aarch64")]
    binary = ["--only-binary=:all:", "--platform=manylinux2014_aarch64", *kinds, f"--python-version={version}"]
    abis = ["--implementation=cp", f"--abi=cp{version.replace('.', '')}", "--abi=abi3", "--abi=none"]
    wheels = FOLDER / "wheels"
    _run(sys.executable, "-m", "pip", "download", "--quiet", "-d", wheels, *binary, *abis, *WHEELS, *TEST_WHEELS)
    for wheel in sorted(wheels.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(SITE)


def _interpreter() -> Path:
    return next((SYSTEM / "usr" / "bin").glob("python3.[0-9]*[0-9]"))


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run(tests: str) -> bool:
    """Run a file or folder of tests. Returns whether all passed."""
    python, path = (Path(sys.executable), "") if IS_ARM else (PROGRAM, f"{ROOT}:{SITE}")
    variables = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "DAGEXEC_CHOICES": "off"}
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", f"--part={_part()}", tests]
    return subprocess.run(command, env={**os.environ, **variables}, cwd=ROOT, check=False).returncode == 0


def has_same_bytes() -> bool:
    """Whether nets on our own kernels alone give the bytes that this processor gives with AVX2."""
    command, settings = ("-m", "tests.arm_bytes", *SAME), {"DAGEXEC_CHOICES": "off", "DAGEXEC_TUNING_SECONDS": "0"}
    here = {**settings, "DAGEXEC_ONEDNN": "off", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    there = {**settings, "PYTHONPATH": f"{ROOT}:{SITE}", "PYTHONDONTWRITEBYTECODE": "1"}
    told = [
        subprocess.run(
            [python, *command], env={**os.environ, **variables}, cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        for python, variables in ((sys.executable, here), (PROGRAM, there))
    ]
    digests = [json.loads(one.stdout.splitlines()[-1]) for one in told]
    print(*digests, sep="\n")
    return digests[0] == digests[1]


def _part() -> str:
    return os.environ.get("DAGEXEC_PART", "commit")


def main() -> int:
    """Run what there is time for. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Chosen tests on 64-bit Arm.")
    parser.add_argument("--install", action="store_true", help="only unpack what is needed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no tests after so many")
    parser.add_argument("tests", nargs="*", help="files or folders instead of those chosen here")
    arguments = parser.parse_args()
    if arguments.install:
        if not IS_ARM:
            install()
        return 0
    chosen: list[tuple[str, Callable[[], bool]]] = [(tests, partial(run, tests)) for tests in arguments.tests or CHOSEN]
    if not IS_ARM and not arguments.tests:
        chosen.append(("the bytes of AVX2", has_same_bytes))
    deadline, part = time.monotonic() + arguments.seconds, part_of_commit()
    turn = (part + part // len(chosen)) % len(chosen)  # another one each time that the matrix comes to this row
    found: dict[str, str] = {}
    for name, check in (*chosen[turn:], *chosen[:turn]):
        begun = time.monotonic()
        if begun > deadline:
            found[name] = "left out for want of time"
            continue
        found[name] = f"{'passed' if check() else 'FAILED'} in {time.monotonic() - begun:.0f} s"
    print("\n64-bit Arm" + ("" if IS_ARM else ", emulated"))
    for name, text in found.items():
        print(f"  {name:50}{text}")
    return int(any(text.startswith("FAILED") for text in found.values()))


if __name__ == "__main__":
    sys.exit(main())
