"""A stand-in for CuPy that runs on the host: kernels are compiled by g++ and run over every thread of every block.

    with emulated():          # dagexec finds two CUDA devices
        ...

`arrays` has its ndarray, `compiler` and `shim.h` its kernels, `runtime` its streams, events and memory, `cublas` its
matrix products.
"""

from tests.cuda.emulated.installation import cuda_devices, emulated, has_compiler, has_gpu

__all__ = ["cuda_devices", "emulated", "has_compiler", "has_gpu"]
