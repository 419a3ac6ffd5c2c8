"""The environment of a measurement: processor, instruction set, cores, load, date, command, versions of libraries."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.platform.processor import available_cores, processor_name

LIMITS = ("ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE")
"""Variables that keep libraries from using all available instructions."""

PACKAGES = ("dagexec", "numpy", "onnx", "onnxruntime", "openvino", "torch")


def environment() -> dict[str, str | int | float]:
    """One flat record to put beside the numbers."""
    found = engine_library()
    record: dict[str, str | int | float] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(sys.argv),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        "python": platform.python_version(),
        "processor": processor_name(),
        "instruction set": "NumPy's" if found is None else found.isa.name,
        "cores": available_cores(),
    }
    record |= {name: value for name in LIMITS if (value := os.environ.get(name))}
    for package in PACKAGES:
        try:
            record[package] = version(package)
        except PackageNotFoundError:
            continue
    if found is not None and found.has_primitives:
        record["onednn"] = ".".join(map(str, found.version))
    return record


def _command(words: Sequence[str]) -> str:
    """The command as one would type it: a package that runs as a module goes by its name."""
    program = Path(words[0])
    return shlex.join([program.parent.name if program.name == "__main__.py" else program.name, *words[1:]])
