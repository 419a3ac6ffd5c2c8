"""CUDA devices: `cuda:N` behind the interface of `dagexec.core.runtime`, on CuPy.

`binding` reaches the libraries; `runtime`, `stream`, `event`, `memory` are the device; `kernels` compiles and launches.
"""

from dagexec.core.cuda.binding import cudnn, cupy
from dagexec.core.cuda.context import CudaContext, copy_blocking, cuda_runtime
from dagexec.core.cuda.runtime import CudaRuntime

__all__ = ["CudaContext", "CudaRuntime", "copy_blocking", "cuda_runtime", "cudnn", "cupy"]
