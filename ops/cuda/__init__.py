"""Operators on CUDA devices. Importing this package registers them; it needs neither CuPy nor a device."""

from dagexec.ops.cuda import activation, copy

__all__ = ["activation", "copy"]
