"""What a benchmark ran on: processor, instruction set, cores, and versions of Python, dagexec, oneDNN and the peers."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dagexec.ops.onednn.binding import library
from dagexec.platform.processor import available_cores, processor_name

LIMITS = ("ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE")
"""Variables that keep libraries from using all instructions that there are."""

PACKAGES = ("dagexec", "numpy", "onnx", "onnxruntime", "openvino", "torch")


def describe() -> dict[str, str | int]:
    """One flat record to put beside the numbers."""
    record: dict[str, str | int] = {
        "python": platform.python_version(),
        "processor": processor_name(),
        "instruction set": "without oneDNN",
        "cores": available_cores(),
    }
    record |= {name: value for name in LIMITS if (value := os.environ.get(name))}
    for package in PACKAGES:
        try:
            record[package] = version(package)
        except PackageNotFoundError:
            continue
    if (onednn := library()) is not None:
        record["onednn"] = ".".join(map(str, onednn.version))
        record["instruction set"] = onednn.isa.name
    return record


def write_report(path: Path, **found: Any) -> None:
    """Write what a benchmark found as JSON, behind what it ran on."""
    path.write_text(json.dumps({"environment": describe()} | found, indent=1) + "\n")
