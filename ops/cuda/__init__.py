"""Operators on CUDA devices. Importing this package registers them; it needs neither CuPy nor a device."""

from dagexec.ops.cuda import activation, columns, copy, unary

__all__ = ["activation", "columns", "copy", "unary"]
