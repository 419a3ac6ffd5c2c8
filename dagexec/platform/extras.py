"""Optional packages, and the command that installs them for the running Python.

The command names the packages and not `dagexec[...]`, so that it serves a checkout, an installed wheel and any index.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dagexec.errors import DagexecError
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    shlex = LazyModule("shlex")
else:
    import shlex


REQUIREMENTS = {
    "onednn": ("cffi>=1.17", "onednn-cpu-gomp==2023.1.0"),
    "cuda12": (
        "cupy-cuda12x>=14",
        "nvidia-cudnn-frontend>=1.10",
        "nvidia-cudnn-cu12>=9.10",
        "nvidia-cublas-cu12>=12.8",
        "nvidia-cuda-nvrtc-cu12>=12.8",
        "nvidia-nccl-cu12>=2.26",
    ),
    "cuda13": (
        "cupy-cuda13x>=14",
        "nvidia-cudnn-frontend>=1.10",
        "nvidia-cudnn-cu13>=9.12",
        "nvidia-cublas>=13",
        "nvidia-cuda-nvrtc>=13",
        "nvidia-nccl-cu13>=2.26",
    ),
    "onnxruntime": ("onnxruntime>=1.20",),
    "openvino": ("openvino>=2025.0",),
    "pandas": ("pandas>=2.2",),
    "plot": ("matplotlib>=3.8",),
    "mpi": ("mpi4py>=4", "openmpi>=5"),
    "telemetry": ("opentelemetry-api>=1.30",),
    "lmdb": ("lmdb>=1.5",),
    "images": ("pillow>=10",),
    "safetensors": ("safetensors>=0.8",),
    "grpc": ("grpcio>=1.70",),
    "serve": ("httptools>=0.6.3", "prometheus-client>=0.20", "pydantic>=2.10", "starlette>=0.40", "uvicorn>=0.30"),
    "ray": ("ray>=2.40",),
    "examples": ("scikit-learn>=1.4",),
}
"""The optional dependencies of pyproject.toml, without those of tests and benchmarks."""


def install_command(extra: str) -> str:
    """A shell command that installs what `extra` needs, for this Python."""
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *REQUIREMENTS[extra]])


def require_pandas() -> Any:
    """The module. Raises DagexecError, with the command that installs it, where it is missing."""
    try:
        import pandas
    except ImportError:
        raise DagexecError(f"tables need pandas; install it with: {install_command('pandas')}") from None
    return pandas
