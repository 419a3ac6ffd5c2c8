"""Convolution: one schema, a module a way to compute it.

`convolution` has the schema and the operator, which chooses by geometry among `one_by_one` (a matrix product and
nothing else), `depthwise` (sums of shifted images) and `im2col` (windows unrolled into columns, then a matrix product).
"""

from dagexec.ops.conv import convolution, locally_connected, unrolled

__all__ = ["convolution", "locally_connected", "unrolled"]
