"""What a benchmark ran on: processor, cores, and the versions of Python, dagexec and the peers."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dagexec.scheduler.intra_op import available_cores

PACKAGES = ("dagexec", "numpy", "onnx", "onnxruntime", "openvino", "torch")


def describe() -> dict[str, str | int]:
    """One flat record to put beside the numbers."""
    record: dict[str, str | int] = {
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": available_cores(),
    }
    for package in PACKAGES:
        try:
            record[package] = version(package)
        except PackageNotFoundError:
            continue
    return record


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
